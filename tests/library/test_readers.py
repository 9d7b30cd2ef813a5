"""What a warming job reads: text, text extracted from PDF, lines of JSON, and what other packages' readers bring."""

from __future__ import annotations

import base64
import json
import os
import random
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace

import pytest
from semantic_text_splitter import TextSplitter
from transformers import PreTrainedTokenizerFast

from benchmarks.questions import read_dataset
from qcfuse_rag import QCFuseError
from qcfuse_rag.library import readers as read
from qcfuse_rag.library.readers import TextSplitting, read_passages, skipped_files
from tests.support.cases import cases
from tests.support.passages import PASSAGES


def test_folders_are_read_in_order_with_the_file_as_source(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_text(PASSAGES[0])
    (tmp_path / "b" / "c.md").write_text(f"# Title\n\n{PASSAGES[1]}")
    (tmp_path / "d.bin").write_bytes(b"\x00")
    passages = read_passages([tmp_path], tokenizer, max_tokens=200)
    assert list(passages) == [str((tmp_path / name).resolve()) for name in ("a.txt", "b/c.md")]
    assert passages[str(tmp_path / "a.txt")] == [PASSAGES[0]]


def test_no_passage_is_longer_than_asked(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "a.txt").write_text(" ".join(PASSAGES * 5))
    [passages] = read_passages([tmp_path], tokenizer, max_tokens=30).values()
    assert len(passages) > 3
    assert all(len(tokenizer(text)["input_ids"]) <= 30 for text in passages)


UNBROKEN = {
    "base64": base64.b64encode(random.Random(0).randbytes(60_000)).decode(),
    "accents": "e" + "\u0301" * 40_000,
    "Chinese": "漢字" * 20_000,
    "joined emoji": "\U0001f469\u200d" * 10_000,
    "domains": "a." * 40_000,
    "code quotes": "`a" * 40_000,
    "table": "|a" * 40_000,
    "words without an end": "mill wheel " * 8_000,
    "runs under the bound": ("x" * 1000 + " ") * 80,
    "spaces": " " * 80_000,
}


@pytest.mark.parametrize("kind", cases(UNBROKEN.keys(), "base64", "Chinese", "table", "words without an end"))
@pytest.mark.parametrize("markdown", [False, True], ids=["plain", "markdown"])
def test_the_splitter_gets_short_lines_and_short_runs(
    tokenizer: PreTrainedTokenizerFast, kind: str, markdown: bool
) -> None:
    """Its time grows with the square of both."""
    text, splitting, parts = UNBROKEN[kind], TextSplitting(tokenizer, 512), list[str]()
    for name in ("_plain", "_markdown"):
        splitter = getattr(splitting, name)
        recorded = SimpleNamespace(chunks=lambda part, split=splitter.chunks: parts.append(part) or split(part))
        setattr(splitting, name, recorded)
    passages = splitting.split(text, markdown=markdown)
    assert "".join(parts) == text
    assert max(len(line) for part in parts for line in part.split("\n")) <= read.PART
    assert not any(read.LONG_RUN.search(part) for part in parts)
    assert "".join("".join(passages).split()) == "".join(text.split())
    assert max((len(tokenizer(passage)["input_ids"]) for passage in passages), default=0) <= 512


def test_only_what_has_no_place_to_split_is_cut(tokenizer: PreTrainedTokenizerFast) -> None:
    prose, run = "\n\n".join(PASSAGES * 40), "x" * 3000
    splitting = TextSplitting(tokenizer, 100)
    apart = splitting.split(prose, markdown=False)
    assert apart == list(TextSplitter.from_huggingface_tokenizer(tokenizer.backend_tokenizer, 100).chunks(prose))
    both = splitting.split(f"{prose}\n\n{run}\n\n{prose}", markdown=False)
    assert both == [*apart, *["x" * 100] * 30, *apart]
    line = " ".join(PASSAGES * 60)
    passages = splitting.split(line, markdown=False)
    assert " ".join(passages) == line
    assert all(passage.endswith((".", "?", "!")) for passage in passages[:-1])


def test_the_page_breaks_of_extracted_pdf_separate(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "a.txt").write_text("\f".join(PASSAGES))
    [passages] = read_passages([tmp_path], tokenizer, max_tokens=80).values()
    assert "\f" not in "".join(passages)
    assert passages == PASSAGES


def test_lines_of_json_are_passages_with_sources(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"text": PASSAGES[0], "source": "one"}, {"text": PASSAGES[1]}, {"text": PASSAGES[2], "source": "one"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    passages = read_passages([path], tokenizer, max_tokens=200)
    assert passages == {"one": [PASSAGES[0], PASSAGES[2]], str(path.resolve()): [PASSAGES[1]]}
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": PASSAGES[1], "source": "one"}))
    assert read_passages([tmp_path], tokenizer, max_tokens=200)["one"] == [PASSAGES[1], PASSAGES[0], PASSAGES[2]]
    texts = ["Orla\u2028steers the\u0085ferry.", "Ann sings."]  # only a line feed ends a line
    path.write_bytes("\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts).encode())
    [own] = read_passages([path], tokenizer, max_tokens=200).values()
    assert own == texts


@pytest.mark.parametrize(
    "line", ["no JSON", "[" * 200_000, "[]", "{}", '{"text": 3}', '{"text": "a", "source": 1}', '"text"']
)
def test_a_bad_line_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(QCFuseError, match=r"rows\.jsonl, line 2"):
        read_passages([path], tokenizer, max_tokens=200)


def test_an_unreadable_path_is_one_clear_error(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for path, message in [
        (tmp_path / "a.pdf", "is not a text file"),
        (tmp_path / "none", "no file or folder"),
        (tmp_path / "latin.txt", "cannot read"),
    ]:
        with pytest.raises(QCFuseError, match=message):
            read_passages([path], tokenizer, max_tokens=200)
    (tmp_path / "empty").mkdir()
    assert read_passages([tmp_path / "empty"], tokenizer, max_tokens=200) == {}


def test_the_other_files_of_a_folder_with_a_bad_file_are_read(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "good.txt").write_text(PASSAGES[0])
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / os.fsdecode(b"na\xefve.txt")).write_text(PASSAGES[1])
    (tmp_path / "rows.jsonl").write_text('{"text": "half \\ud800"}')
    unread: list[str] = []
    passages = read_passages([tmp_path], tokenizer, max_tokens=200, unread=unread)
    assert list(passages) == [str(tmp_path / "good.txt")]
    for message, name in zip(unread, ("latin.txt", r"na\xefve.txt", "rows.jsonl, line 1"), strict=True):
        assert name in message
    with pytest.raises(QCFuseError, match=r"latin\.txt"):
        read_passages([tmp_path / "latin.txt"], tokenizer, max_tokens=200, unread=unread)


def test_skipped_files_of_a_folder_are_reported(tmp_path: Path) -> None:
    named, elsewhere = tmp_path / "named", tmp_path / "elsewhere"
    for folder in (named / "below", named / ".git", elsewhere):
        folder.mkdir(parents=True)
    for name in ("a.txt", "a.PDF", "below/b.pdf", "LICENSE", ".DS_Store", ".git/index.bin", os.fsdecode(b"n.\xef")):
        (named / name).write_text("text")
    (named / "link").symlink_to(elsewhere)
    (named / "gone").symlink_to(tmp_path / "nowhere")
    link, other = skipped_files([named, named / "a.txt"])
    assert link.startswith(f"{named / 'link'} links to a folder, which is not followed")
    assert other == f"{named} has files that are not text (2 .pdf, 1 without ending, 1 .?); convert them first"
    assert list(skipped_files([named, elsewhere])) == [other]
    assert list(skipped_files([elsewhere])) == []


def test_links_out_of_a_folder_are_not_followed_and_said(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "folder-beside"
    for path in (folder / "below", folder / ".hidden", outside):
        path.mkdir(parents=True)
    secret, own = outside / "secret.txt", folder / "own.txt"
    secret.write_text("The key is under the mat.")
    own.write_text(PASSAGES[0])
    (folder / "absolute.txt").symlink_to(secret)
    (folder / "below" / "relative.md").symlink_to("../../folder-beside/secret.txt")
    (folder / "chain.txt").symlink_to("absolute.txt")
    (folder / ".hidden" / "a.txt").symlink_to(secret)
    (folder / "below" / "up").symlink_to(outside)
    (folder / "lines.jsonl").symlink_to(outside / "rows.jsonl")
    (outside / "rows.jsonl").write_text('{"text": "The key is under the mat."}')
    (folder / "below" / "inside.txt").symlink_to(own)
    passages = read_passages([folder], tokenizer, max_tokens=200)
    assert passages == {str(own): [PASSAGES[0]]}
    said = list(skipped_files([folder]))
    links = ["absolute.txt", "below/relative.md", "chain.txt", ".hidden/a.txt", "lines.jsonl"]
    assert {line for line in said if "links to a file elsewhere" in line} == {
        f"{folder / link} links to a file elsewhere, which is not read; name that file as well" for link in links
    }
    for named in ([folder, secret], [folder, outside], [folder / "absolute.txt"]):
        assert any(
            "key" in text for texts in read_passages(named, tokenizer, max_tokens=200).values() for text in texts
        )
    assert not any("secret" in line or "absolute" in line for line in skipped_files([folder, outside]))


def test_a_file_is_read_once_however_often_it_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "a.txt"
    path.write_text(PASSAGES[0])
    (tmp_path / "b.txt").symlink_to(path)
    passages = read_passages([path, tmp_path, path, tmp_path / "."], tokenizer, max_tokens=200)
    assert passages == {str(path): [PASSAGES[0]]}


def test_installed_packages_bring_readers(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_point = EntryPoint("shelf", f"{__name__}:read_shelf", read.READERS_GROUP)
    monkeypatch.setattr(read, "entry_points", lambda group: EntryPoints([entry_point]))
    monkeypatch.setattr(EntryPoint, "load", lambda self: read_shelf)
    passages = read_passages([tmp_path], tokenizer, reader="shelf", max_tokens=4)
    assert passages == {"shelf": PASSAGES}, "passages of other readers are not split"
    with pytest.raises(QCFuseError, match="no reader 'shelve'; there are files, shelf"):
        read_passages([tmp_path], tokenizer, reader="shelve", max_tokens=4)


def read_shelf(path: Path) -> list[tuple[str, str]]:
    return [("shelf", text) for text in PASSAGES]


def test_a_byte_order_mark_is_not_text(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "a.md").write_text(f"# Mill\n\n{PASSAGES[0]}", "utf-8-sig")
    (tmp_path / "b.jsonl").write_text(json.dumps({"id": "b", "text": PASSAGES[1]}), "utf-8-sig")
    passages = read_passages([tmp_path], tokenizer, max_tokens=200)
    assert [texts[0] for texts in passages.values()] == [f"# Mill\n\n{PASSAGES[0]}", PASSAGES[1]]
    (tmp_path / "c.jsonl").write_text(
        json.dumps({"question": "Who?", "passages": PASSAGES, "answers": "Orla"}), "utf-8-sig"
    )
    assert [sample.question for sample in read_dataset(tmp_path / "c.jsonl")] == ["Who?"]
