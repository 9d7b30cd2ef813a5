"""The playground in a browser, over `qcfuse serve` with a tiny model."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.monitoring.test_explain import WCAG_AA, contrast
from tests.support.library import HARBOUR
from tests.support.passages import PASSAGES, QUESTION
from tests.support.serving import QCFUSE, run_server

CHROMIUM = shutil.which("chromium")
Page = Any
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.slow,
    pytest.mark.enable_socket,
]

TOKEN = "right"
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"

SHOWN_COLOURS = """() => {
  const opaque = (colour) => !/rgba\\(.*, 0\\)|transparent/.test(colour);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (opaque(colour)) return colour;
    }
    return getComputedStyle(document.documentElement).backgroundColor;
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const shown = [];
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    shown.push([getComputedStyle(element).color, behind(element), walker.currentNode.data.trim().slice(0, 40)]);
  }
  return shown;
}"""
"""Returns colour, background and beginning of every text that is shown."""


@pytest.fixture(scope="module")
def library(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("playground")
    documents = folder / "documents"
    documents.mkdir()
    for name, text in zip(("ferry.md", "hull.md", "mill.md"), PASSAGES, strict=True):
        (documents / name).write_text(text)
    command = ["warm", "run", documents, "--store", folder / "library", "--model", model_folder, "--device", "cpu"]
    subprocess.run([*QCFUSE, *map(str, command)], check=True, capture_output=True)
    return folder / "library"


@pytest.fixture(scope="module")
def address(library: Path) -> Iterator[str]:
    """Return the page of a server that keeps no finished requests, so that every answer is computed anew."""
    with run_server(library, "--editable", "--prefix-mb", "0") as address:
        yield address


@pytest.fixture(scope="module")
def guarded_address(library: Path) -> Iterator[str]:
    """Return the page of a server with a token, whose documents cannot be changed."""
    with run_server(library, QCFUSE_TOKEN=TOKEN) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, address: str, **settings: Any) -> Iterator[Page]:
    """Open the page in a new window; nothing may be reported as an error or a violation of the policy meanwhile."""
    context = browser.new_context(**settings)
    page, problems = context.new_page(), list[str]()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(address)
    yield page
    context.close()
    refused = re.compile(r"Failed to load resource: the server responded with a status of (401|404)")
    assert [problem for problem in problems if not refused.match(problem)] == []


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Page]:
    with opened(browser, address) as page:
        page.get_by_text("3 documents").wait_for()
        page.get_by_label("Token limit").fill("12")
        yield page


@pytest.fixture
def guarded_page(browser: Any, guarded_address: str) -> Iterator[Page]:
    with opened(browser, guarded_address) as page:
        page.locator("#token").fill(TOKEN)
        page.locator("#token").press("Enter")
        page.get_by_text("3 documents").wait_for()
        page.get_by_label("Token limit").fill("12")
        yield page


def ask(page: Page, question: str = QUESTION) -> Any:
    """Ask, wait for the whole answer, and return its turn."""
    turns = page.locator(".turn")
    turn = turns.nth(turns.count())  # `last` would be another one after the next question
    page.locator("#question").fill(question)
    page.locator("#question").press("Enter")
    turn.locator(".clock", has_text="whole answer after").first.wait_for()
    page.locator("#send").wait_for()
    return turn


def open_passages(turn: Any) -> Any:
    """Open the passages of an answer and return them; a browser reports the opening in a later task."""
    turn.get_by_text("Passages and recomputed tokens").first.click()
    passages = turn.locator(".part.from-chunk")
    passages.first.wait_for()
    return passages


def test_an_answer_streams_beside_its_clock_and_says_what_was_reused(page: Page) -> None:
    turn = ask(page)
    assert turn.locator("h3").inner_text() == QUESTION
    assert turn.locator(".answer > .text").inner_text().strip()
    assert re.search(r"First token after \d+\.\d+ s, whole answer after", turn.locator(".clock").inner_text())
    counted = re.findall(r"([\d,]+) (tokens:|from the store|recomputed|computed)", turn.locator(".counts").inner_text())
    numbers = {words: int(number.replace(",", "")) for number, words in counted}
    assert numbers.pop("tokens:") == sum(numbers.values())
    assert min(numbers[name] for name in ("from the store", "recomputed", "computed")) > 0
    assert turn.locator(".bar span").count() >= 3


def test_recomputed_tokens_are_shaded(page: Page) -> None:
    turn = ask(page)
    passages = open_passages(turn)
    assert passages.count() == len(PASSAGES)
    assert {passages.nth(index).locator(".text").inner_text().strip() for index in range(3)} == set(PASSAGES)
    headings = passages.locator("summary").all_inner_texts()
    assert [heading.split(": ")[0] for heading in headings] == ["Passage 1", "Passage 2", "Passage 3"]
    assert {heading.split(": ")[1] for heading in headings} == {"ferry.md", "hull.md", "mill.md"}
    shaded = turn.locator(".part .text mark")
    assert shaded.count() > 0
    colours = "element => getComputedStyle(element).backgroundColor"
    assert {mark.evaluate(colours) for mark in shaded.all()} == {"rgb(255, 213, 74)"}
    assert turn.locator(".part .text .reused").first.evaluate(colours) == "rgba(0, 0, 0, 0)"
    assert "average here" in turn.locator(".part ol").first.inner_text()


def test_full_prefill_answers_in_a_column_with_a_clock_of_its_own(page: Page) -> None:
    page.get_by_label("Compare with full prefill").check()
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    turn = ask(page)
    fused, full = turn.locator(".answer").all()
    assert [each.locator("h4").inner_text() for each in (fused, full)] == ["Over stored caches", "Full prefill"]
    assert re.search(r"That took \d+\.\d times as long\.", full.locator(".clock").inner_text())
    assert re.fullmatch(r"([\d,]+) tokens:\s+\1 computed\.", full.locator(".counts").inner_text())
    assert full.locator("> .text").inner_text().strip()
    assert [body.get("method") for body in sent] == [None, "full"]
    assert sent[0]["messages"] == sent[1]["messages"]
    boxes = [each.bounding_box() for each in (fused, full)]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]


def test_a_question_asked_while_another_is_answered_waits_and_then_streams(
    browser: Any, page: Page, address: str
) -> None:
    page.get_by_label("Token limit").fill("1000")
    page.locator("#question").fill(QUESTION)
    with opened(browser, address) as other:
        other.get_by_text("3 documents").wait_for()
        other.get_by_label("Token limit").fill("12")
        other.evaluate("""() => {
          window.seen = [];
          const shown = (part) => document.querySelector(`.turn .answer > .${part}`)?.textContent ?? "";
          new MutationObserver(() => window.seen.push([shown("clock"), shown("text").length])).observe(
            document.getElementById("turns"), { childList: true, subtree: true, characterData: true });
        }""")
        page.locator("#question").press("Enter")
        page.get_by_text("First token after").wait_for()
        ask(other)
        seen = other.evaluate("window.seen")
    assert page.locator("#stop").is_visible(), "the first answer is not complete"
    page.keyboard.press("Escape")
    clocks = list(dict.fromkeys(re.sub(r"after \d.*", "", clock).strip() for clock, _ in seen if clock))
    assert clocks == ["No token yet", "First token"]
    assert len({length for _, length in seen}) > 3, "it came in pieces"


def test_keys_do_everything(page: Page) -> None:
    """Ask by Enter, begin a line by Shift+Enter, stop by Escape, open the passages and read on by Tab."""
    page.get_by_label("Token limit").fill("1000")
    page.locator("#question").focus()
    page.keyboard.type("One line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and another")
    page.keyboard.press("Enter")
    turn = page.locator(".turn")
    turn.get_by_text("First token after").wait_for()
    assert turn.locator("h3").inner_text() == "One line\nand another"
    page.keyboard.press("Escape")
    turn.get_by_text("Stopped after").wait_for()
    assert page.locator("#question").evaluate("element => element === document.activeElement")
    page.get_by_text("New conversation").click()
    page.get_by_label("Token limit").fill("4")
    turn = ask(page)
    turn.locator(".explanation > summary").focus()
    page.keyboard.press("Space")
    turn.locator(".part").first.wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.part') !== null")
    for control in page.locator("button:visible, input:visible, textarea:visible").all():
        assert control.evaluate("element => element.labels?.length || element.ariaLabel || element.textContent.trim()")


def test_a_conversation_goes_on_until_a_new_one(guarded_page: Page) -> None:
    page, sent = guarded_page, list[dict[str, Any]]()
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    page.get_by_text("Start the server with --editable").wait_for()
    assert page.locator(".document").count() == 3
    assert page.locator("#files, .document button").locator("visible=true").count() == 0
    first = ask(page)
    ask(page, "And when does the council meet?")
    third = ask(page, "And where is the paint?")
    roles = [[message["role"] for message in body["messages"]] for body in sent]
    assert roles == [["user"], ["user", "assistant", "user"], ["user", "assistant", "user", "assistant", "user"]]
    assert sent[1]["messages"][1]["content"] == first.locator(".answer > .text").text_content().removesuffix(" …")
    assert "from earlier requests" in third.locator(".counts").inner_text()
    page.get_by_text("New conversation").click()
    assert page.locator(".turn").count() == 0
    ask(page)
    assert len(sent[-1]["messages"]) == 1


def test_documents_are_warmed_listed_answered_from_and_removed(page: Page) -> None:
    page.locator("#files").set_input_files([{"name": "harbour.md", "mimeType": "", "buffer": HARBOUR.encode()}])
    page.get_by_text("harbour.md was warmed: 1 passage.").wait_for()
    page.get_by_text("4 documents").wait_for()
    turn = ask(page, "Where does the harbour master live?")
    assert HARBOUR in open_passages(turn).locator(".text").all_inner_texts()[0]
    page.get_by_role("button", name="Remove harbour.md").click()
    page.get_by_text("harbour.md was removed.").wait_for()
    page.get_by_text("3 documents").wait_for()
    assert page.get_by_role("button", name="Remove harbour.md").count() == 0


def test_dropped_files_show_their_progress_or_what_is_wrong_with_them(page: Page) -> None:
    page.evaluate("""() => {
      window.seen = [];
      new MutationObserver(() => {
        for (const each of document.querySelectorAll(".job .state")) window.seen.push(each.textContent);
      }).observe(document.getElementById("jobs"), { childList: true, subtree: true, characterData: true });
    }""")
    text = "\n\n".join(f"{passage} That was in the year {1900 + n}." for n in range(20) for passage in PASSAGES)
    page.evaluate(
        """(text) => {
          const dropped = new DataTransfer();
          dropped.items.add(new File([text], "long.txt"));
          dropped.items.add(new File([new Uint8Array([0xff, 0xfe, 0x00])], "photo.jpg"));
          const drop = new DragEvent("drop", { dataTransfer: dropped, bubbles: true, cancelable: true });
          document.getElementById("drop").dispatchEvent(drop);
        }""",
        text,
    )
    page.get_by_text("not a text file in UTF-8").wait_for()
    page.get_by_text("4 documents").wait_for()
    assert page.locator(".job .name").all_inner_texts() == ["photo.jpg"]
    steps = [re.fullmatch(r"([\d,]+) of ([\d,]+) tokens", state) for state in page.evaluate("window.seen")]
    done = [int(step[1].replace(",", "")) for step in steps if step is not None]
    assert done == sorted(done)
    assert len(set(done)) > 1
    page.get_by_role("button", name="Remove long.txt").click()
    page.get_by_text("3 documents").wait_for()


def test_texts_are_never_html(page: Page) -> None:
    page.get_by_text("Paste text").click()
    page.get_by_label("Name").fill(HOSTILE)
    page.get_by_label("Text", exact=True).fill(f"{HOSTILE} is what the harbour master wrote on the wall.")
    page.get_by_role("button", name="Add the document").click()
    page.get_by_text("4 documents").wait_for()
    turn = ask(page, f"What did the harbour master write on the wall? {HOSTILE}")
    assert HOSTILE in open_passages(turn).locator(".text").all_inner_texts()[0]
    assert HOSTILE in turn.locator("h3").inner_text()
    assert page.locator("img, #documents script, main script").count() == 0
    assert page.title() == "qcfuse-rag playground"
    page.locator(".document", has_text="onerror").get_by_role("button").click()
    page.get_by_text("3 documents").wait_for()


@pytest.mark.parametrize(("scheme", "width"), [("light", 320), ("dark", 1200)])
def test_all_text_is_readable_and_fits(browser: Any, address: str, scheme: str, width: int) -> None:
    with opened(browser, address, color_scheme=scheme, viewport={"width": width, "height": 800}) as page:
        page.get_by_text("3 documents").wait_for()
        page.get_by_label("Token limit").fill("12")
        page.get_by_label("Compare with full prefill").check()
        turn = ask(page)
        open_passages(turn)
        page.get_by_text("Paste text").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        shown = page.evaluate(SHOWN_COLOURS)
        assert len(shown) > 40
        for colour, back, text in shown:
            assert contrast(as_hex(colour), as_hex(back)) >= WCAG_AA, (text, colour, back)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") == (scheme == "light")


def as_hex(colour: str) -> str:
    channels = re.findall(r"[\d.]+", colour)
    assert channels[3:] in ([], ["1"]), colour
    return "#" + "".join(f"{int(channel):02x}" for channel in channels[:3])


def test_a_server_with_a_token_asks_until_it_is_right_and_the_tab_forgets_it(
    browser: Any, guarded_address: str
) -> None:
    with opened(browser, guarded_address) as page:
        page.locator("#token").fill("wrong")
        page.get_by_role("button", name="Continue").click()
        page.get_by_text("it is missing or wrong").wait_for()
        page.locator("#token").fill(TOKEN)
        page.keyboard.press("Enter")
        page.get_by_text("3 documents").wait_for()
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 1, ""]
        page.reload()
        page.get_by_text("3 documents").wait_for()
        page.get_by_role("button", name="Forget the token").click()
        page.locator("#token").wait_for()
        assert page.evaluate("sessionStorage.length") == 0
