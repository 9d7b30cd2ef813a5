"""What a warming job reads: text, text extracted from PDF, lines of JSON, and what other packages' readers bring."""

from __future__ import annotations

import base64
import codecs
import json
import os
import random
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace

import pytest
from semantic_text_splitter import TextSplitter
from transformers import PreTrainedTokenizerFast

from benchmarks.questions import read_dataset
from qcfuse_rag import QCFuseError
from qcfuse_rag.library import readers as read
from qcfuse_rag.library.files import HIDDEN, LINKS, LOOPS, NO_FILE, Unread, find_files
from qcfuse_rag.library.plain_text import UnreadableFile, decode_text
from qcfuse_rag.library.readers import TextSplitting, read_passages
from tests.support.cases import cases
from tests.support.passages import PASSAGES


def test_folders_are_read_in_order_with_the_file_as_source(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_text(PASSAGES[0])
    (tmp_path / "b" / "c.md").write_text(f"# Title\n\n{PASSAGES[1]}")
    (tmp_path / "d.bin").write_bytes(b"\x00")
    passages = read_passages([tmp_path], tokenizer, max_tokens=200, unread={})
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
    "lines": "mill wheel\n" * 30_000,
}


@pytest.mark.parametrize("kind", cases(UNBROKEN.keys(), "base64", "Chinese", "table", "lines"))
@pytest.mark.parametrize("markdown", [False, True], ids=["plain", "markdown"])
def test_the_splitter_gets_short_lines_and_short_runs(
    tokenizer: PreTrainedTokenizerFast, kind: str, markdown: bool
) -> None:
    """Its time grows with the square of both, and nothing interrupts it."""
    text, splitting, parts = UNBROKEN[kind], TextSplitting(tokenizer, 512), list[str]()
    for name in ("_plain", "_markdown"):
        splitter = getattr(splitting, name)
        recorded = SimpleNamespace(chunks=lambda part, split=splitter.chunks: parts.append(part) or split(part))
        setattr(splitting, name, recorded)
    passages = splitting.split(text, markdown=markdown)
    assert "".join(parts) == text
    assert max(map(len, parts)) <= read.LONG_PART
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
    with pytest.raises(QCFuseError, match=r"rows\.jsonl: line 2"):
        read_passages([path], tokenizer, max_tokens=200)


def test_an_unreadable_path_is_one_clear_error(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    for name, message in [
        ("a.png", "cannot read .*: not text"),
        ("none", "no file or folder"),
        ("loop", "no file or folder"),
        ("pipe", "no file to read"),
    ]:
        with pytest.raises(QCFuseError, match=message):
            read_passages([tmp_path / name], tokenizer, max_tokens=200)
    (tmp_path / "empty").mkdir()
    assert read_passages([tmp_path / "empty"], tokenizer, max_tokens=200) == {}


ENGLISH = "The ferry leaves at nine; Orla keeps the paint in the green shed.\n"
FRENCH = "Le café est fermé à midi. Où est la clé de l'écurie, garçon ?\n"
CHINESE = "渡轮每天早上九点过河。奥拉把油漆放在绿色的棚子里。\n"
JAPANESE = "渡し船は毎朝九時に川を渡ります。ペンキは緑の小屋にあります。\n"
RUSSIAN = "Паром пересекает реку каждое утро в девять.\n"
DECODED = {
    "utf-8": (FRENCH.encode(), FRENCH),
    "utf-16 with a mark": (ENGLISH.encode("utf-16"), ENGLISH),
    "utf-16-be with a mark": (codecs.BOM_UTF16_BE + CHINESE.encode("utf-16-be"), CHINESE),
    "utf-32 with a mark": (ENGLISH.encode("utf-32"), ENGLISH),
    "utf-16-le": (ENGLISH.encode("utf-16-le"), ENGLISH),
    "utf-16-be": (ENGLISH.encode("utf-16-be"), ENGLISH),
    "short utf-16": ("Hi.".encode("utf-16-le"), "Hi."),
    "Chinese utf-16": (CHINESE.encode("utf-16-be"), CHINESE),
    "Japanese utf-16": (JAPANESE.encode("utf-16-le"), JAPANESE),
    "Russian utf-16": (RUSSIAN.encode("utf-16-le"), RUSSIAN),
    "utf-32": (ENGLISH.encode("utf-32-le"), ENGLISH),
    "latin-1": (FRENCH.encode("latin-1"), FRENCH),
    "one accent": (
        b"# comment\n" * 30_000 + b"caf\xe9 is closed at noon",
        "# comment\n" * 30_000 + "café is closed at noon",
    ),
    "windows-1252": ("The “mill” is shut — says Orla.".encode("cp1252"), "The “mill” is shut — says Orla."),
    "windows-1251": (RUSSIAN.encode("cp1251"), RUSSIAN),
    "gb18030": (CHINESE.encode("gb18030"), CHINESE),
    "shift-jis": (JAPANESE.encode("cp932"), JAPANESE),
    "euc-kr": (
        "나룻배는 매일 아침 아홉 시에 강을 건넙니다.".encode("euc-kr"),
        "나룻배는 매일 아침 아홉 시에 강을 건넙니다.",
    ),
    "utf-8 cut in a character": (FRENCH.encode() + "é".encode()[:1], FRENCH + "\ufffd"),
    "a log with colours": (b"\x1b[31merror\x1b[0m: no paint", "\x1b[31merror\x1b[0m: no paint"),
}


@pytest.mark.parametrize("kind", DECODED)
def test_text_is_decoded_by_its_mark_or_by_what_it_is(kind: str) -> None:
    data, text = DECODED[kind]
    assert decode_text(data) == text


BINARY = {
    "random": random.Random(0).randbytes(5000),
    "short": b"\0\1\2\3",
    "image": b"\x89PNG\r\n\x1a\n" + random.Random(1).randbytes(300),
    "program": Path(sys.executable).read_bytes()[:100_000],
    "text with NUL": b"a line\0of text\n" * 20,
    "marked text with NUL": "a\0b".encode("utf-16"),
    "half a character": "ab".encode("utf-16") + b"c",
}


@pytest.mark.parametrize("kind", BINARY)
def test_what_is_not_text_reaches_no_model(kind: str) -> None:
    with pytest.raises(UnreadableFile, match=r"not text|encoding"):
        decode_text(BINARY[kind])


def test_a_folder_is_read_as_ripgrep_does(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Programs and settings are text too; hidden and ignored files are left out, and links are not followed."""
    folder, outside = tmp_path / "repo" / "named", tmp_path / "outside"
    texts = ("a.py", "run.sh", "Makefile", "x.conf", "t.csv", "docs/kept.log", ".shown", "below/top.txt")
    ignored = (".git/HEAD", "node_modules/x/i.js", "below/__pycache__/a.pyc", "b.log", "docs/c.log", ".env", "top.txt")
    for name in (*texts, *ignored, "docs/drafts/a.md"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(ENGLISH)
    (folder / ".gitignore").write_text("*.log\n/top.txt\n!.shown\n[z-a]\n!\n" + "*a" * 40 + "\n")
    (folder / "docs" / ".ignore").write_text("drafts/\n!kept.log\n")
    (folder.parent / ".git").mkdir()
    (folder.parent / ".gitignore").write_text("x.conf\nnamed/\n")  # what is named is read
    (folder / "loop").symlink_to("loop")
    (folder / "gone").symlink_to("nowhere")
    (folder / "below" / "up").symlink_to(folder)
    (folder / "again.txt").symlink_to(folder / "a.py")
    outside.mkdir()
    (outside / "secret.txt").write_text("The key is under the mat.")
    (folder / "secret").symlink_to(outside)
    (folder / "secret.txt").symlink_to(outside / "secret.txt")
    (folder / os.fsdecode(b"na\xefve.txt")).write_text(ENGLISH)
    (folder / "lines.jsonl").write_text('{"text": "a\\u0000b"}')
    (folder / "locked.txt").write_text(ENGLISH)
    (folder / "locked.txt").chmod(0)
    os.mkfifo(folder / "pipe")
    unread: Unread = {}
    passages = read_passages([folder], tokenizer, max_tokens=200, unread=unread)
    locked = unread.pop("cannot be read (Permission denied)", None)  # root reads it
    if locked is None:
        passages.pop(str(folder / "locked.txt"))
    assert {Path(source).relative_to(folder).as_posix() for source in passages} == set(texts)
    assert {text for found in passages.values() for text in found} == {ENGLISH.strip()}
    hidden = [
        ".env",
        ".git/",
        ".gitignore",
        "b.log",
        "below/__pycache__/",
        "docs/.ignore",
        "docs/c.log",
        "docs/drafts/",
    ]
    assert sorted(unread.pop(HIDDEN)) == [*hidden, "node_modules/", "top.txt"]
    assert sorted(unread.pop(LINKS)) == ["secret", "secret.txt"]
    assert sorted(unread.pop(LOOPS)) == ["gone", "loop"]
    assert unread.pop(NO_FILE) == ["pipe"]
    assert sorted(paths[0] for paths in unread.values()) == ["lines.jsonl", "na?ve.txt"]
    assert find_files([folder / "secret.txt", folder / ".env", folder / "node_modules"]) == [
        folder / "secret.txt",
        folder / ".env",
        folder / "node_modules" / "x" / "i.js",
    ]


def test_a_repository_is_ignored_from_its_root(tmp_path: Path) -> None:
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    (tmp_path / "repo" / "docs" / "build").mkdir(parents=True)
    (tmp_path / "repo" / ".gitignore").write_text("*.log\n/docs/build\n")
    (tmp_path / ".gitignore").write_text("*.md\n")  # not of this repository
    for name in ("a.log", "a.md", "build/b.txt"):
        (tmp_path / "repo" / "docs" / name).write_text("text")
    docs = tmp_path / "repo" / "docs"
    assert find_files([docs]) == [docs / "a.md"]
    assert find_files([docs / "build"]) == [docs / "build" / "b.txt"]


def test_a_large_file_is_read_if_it_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "MOST_TEXT_BYTES", 3 << 20)
    large = tmp_path / "log.txt"
    large.write_text("\n" * (3 << 20) + "The end.")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": PASSAGES[0]}) + "\n" * (3 << 20))
    unread: Unread = {}
    assert list(read_passages([tmp_path], tokenizer, max_tokens=200, unread=unread)) == [str(tmp_path / "rows.jsonl")]
    assert unread == {"larger than 3 MB; name the file to read it": ["log.txt"]}
    assert read_passages([large], tokenizer, max_tokens=200) == {str(large): ["The end."]}


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


def test_progress_goes_on_while_one_long_text_is_split(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    long, short = tmp_path / "long.txt", tmp_path / "short.txt"
    long.write_text(f"{PASSAGES[0]}\n\n" * (900_000 // len(PASSAGES[0])))
    short.write_text(f"{PASSAGES[1]}\n\n" * (9_000 // len(PASSAGES[1])))
    seen = list[tuple[int, int]]()
    read_passages([long, short], tokenizer, max_tokens=200, progress=lambda *counts: seen.append(counts))
    total = long.stat().st_size // 1000 + short.stat().st_size // 1000
    assert {counts[1] for counts in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert sum(0 < done < total - 50 for done, _ in seen) >= 3, "in the middle of the long text"
    assert seen[-1] == (total, total)


@pytest.mark.slow
def test_ctrl_c_ends_the_reading_of_a_long_text(model_folder: str, tmp_path: Path) -> None:
    (text := tmp_path / "long.txt").write_text(f"{PASSAGES[0]}\n\n" * (50_000_000 // len(PASSAGES[0])))
    command = ["warm", "run", str(text), "--store", str(tmp_path / "s"), "--model", model_folder, "--device", "cpu"]
    running = subprocess.Popen(
        [sys.executable, "-c", "from qcfuse_rag.cli.app import run; run()", *command],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    for line in running.stderr:
        if line.startswith("reading documents: "):
            break
    assert f" of {text.stat().st_size // 1000:,} KB" in line
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=30)
    assert (running.returncode, "interrupted; stored caches are kept" in err) == (130, True)
