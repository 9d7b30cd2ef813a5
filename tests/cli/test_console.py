"""Text from elsewhere, such as names of documents, does not command the terminal."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.table import Table

from qcfuse_rag import DiskStore
from qcfuse_rag.cli import console
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.testing import example_chunk, example_key
from tests.support.cli import Run

ATTACKS = {
    "clipboard": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "title": "\x1b]0;owned\x1b\\",
    "clear": "\x1b[2J\x1b[H",
    "eight-bit command": "\x9b2J",
    "eight-bit string": "\x9d52;c;eA==\x9c",
    "bell and backspace": "a\x07\x08\x08b",
    "overwritten line": "bad\rgood",
    "reversed": "exe.\u202etxt",
    "isolated": "\u2066a\u2069\u200f",
    "hidden tags": "a\U000e0041",
    "line separator": "a\u2028b",
    "delete": "a\x7f",
    "link": "\x1b]8;;http://example.com\x1b\\x\x1b]8;;\x1b\\",
    "markup": "[red]a[/red] [link=http://example.com]b[/link]",
}
FORBIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\U000e0000-\U000e007f]"
)


def test_names_of_documents_are_shown_and_not_obeyed(run: Run, tmp_path: Path) -> None:
    name = f"before{''.join(ATTACKS.values())}after"
    with DiskStore(tmp_path / "kv") as store:
        store.put(example_key(0), example_chunk(0))
        sources = Sources(store)
        sources.replace(name, [example_key(0)])
        sources.close()
    code, out, err = run("store", "sources", "--store", tmp_path)
    assert (code, FORBIDDEN.findall(out + err)) == (0, [])
    assert "before" in out
    assert "after" in out
    code, out, _ = run("store", "sources", "--store", tmp_path, "--json")
    assert (code, FORBIDDEN.findall(out)) == (0, [])
    assert list(json.loads(out)["sources"]) == [name], "JSON still says the exact name"
    code, out, err = run("store", "lookup", "--store", tmp_path, f"{name}!")
    assert (code, FORBIDDEN.findall(out + err)) == (1, [])


@pytest.mark.parametrize("attack", ATTACKS)
def test_every_way_to_print_is_harmless(capsys: pytest.CaptureFixture[str], attack: str) -> None:
    text = ATTACKS[attack]
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    for terminal in (console.OUT, console.ERR):
        console.print_line(text, terminal)
        terminal.print(table)
        terminal.print(text, end="", markup=False, soft_wrap=True)
    console.print_note(text.replace("[", ""), text)
    console.print_result({text: text}, True)
    console.print_result({}, False, text)
    with console.status(text.replace("[", "")):
        pass
    with console.progress_bar(text.replace("[", ""), text.replace("[", "")) as advance:
        advance(1, 2)
    captured = capsys.readouterr()
    assert FORBIDDEN.findall(captured.out + captured.err) == []


def test_ordinary_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = "Grüße, 漢字, \u0645\u0631\u062d\u0628\u0627, \U0001f469\u200d\U0001f52c\tand a\nline"
    console.print_line(text)
    assert capsys.readouterr().out.split() == text.split()


def test_a_bar_shows_the_rate_from_the_first_report_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first report of a job on a CPU comes after seconds, and the second one after seconds more."""
    clock, terminal = [100.0], Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(console, "ERR", terminal)
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    with console.progress_bar("prefilling", "tokens") as advance:
        clock[0] += 8
        advance(2000, 16000)
    assert "2,000 of 16,000 tokens, 250 per second" in terminal.file.getvalue()


def test_without_a_terminal_a_long_run_prints_lines_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([0.0, 0.1, 5.0, 10.2, 12.0, 40.0])
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    with console.progress_bar("prefilling passages", "tokens") as advance:
        for done in (0, 500, 1000, 1200, 4000):
            advance(done, 4000)
    assert capsys.readouterr().err.splitlines() == [
        "prefilling passages: 0 of 4,000 tokens",
        "prefilling passages: 1,000 of 4,000 tokens, about 30.6 s left",
        "prefilling passages: 4,000 of 4,000 tokens in 40 s",
    ]
    with console.status("loading the model"):
        assert capsys.readouterr().err == "loading the model ...\n", "before the work, not after it"
    monkeypatch.undo()
    with console.progress_bar("reading", "files") as advance:
        advance(1, 2)
        assert capsys.readouterr().err.splitlines()[-1].startswith("reading: 1 of 2 files")


@pytest.mark.parametrize(("text", "sentence"), [("there is no x", "there is no x."), ("Stop!", "Stop!"), ("a. ", "a.")])
def test_errors_end_as_sentences(text: str, sentence: str) -> None:
    assert console.with_full_stop(text) == sentence
