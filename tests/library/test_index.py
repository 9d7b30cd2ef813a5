"""The files of an index, which are old or new whatever happens, and the log of what was retrieved from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.library import index as module
from qcfuse_rag.library.documents import vanished_files
from qcfuse_rag.library.index import METADATA, IndexedPassage, PassageIndex, RetrievalLog

OLD = PassageIndex("M", [IndexedPassage("a", "old")], np.zeros((1, 2), np.float32))
NEW = PassageIndex("M", [IndexedPassage("a", "new")], np.ones((1, 2), np.float32))


def contents(folder: Path) -> tuple[str, float]:
    loaded = PassageIndex.load(folder)
    return loaded.passages[0].text, float(loaded.embeddings[0, 0])


@pytest.mark.parametrize("failing", ["passages", "about"])
def test_an_index_that_was_not_saved_to_the_end_is_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    OLD.save(tmp_path)
    files, write = set(tmp_path.iterdir()), module.write_atomically

    def interrupted(path: Path, text: str) -> None:
        assert contents(tmp_path) == ("old", 0.0)
        if path.name.startswith(failing):
            raise OSError(28, "No space left on device")
        write(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_atomically", interrupted)
        with pytest.raises(OSError, match="No space left"):
            NEW.save(tmp_path)
    assert contents(tmp_path) == ("old", 0.0)
    assert set(tmp_path.iterdir()) == files
    NEW.save(tmp_path)
    assert contents(tmp_path) == ("new", 1.0)
    assert len([*tmp_path.iterdir()]) == 3
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_a_reader_whose_files_are_replaced_reads_the_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    OLD.save(tmp_path)
    load, saved = np.load, list[bool]()

    def replaced(path: Path, **options: Any) -> Any:
        if not saved:
            saved.append(True)
            NEW.save(tmp_path)
        return load(path, **options)

    monkeypatch.setattr(np, "load", replaced)
    assert contents(tmp_path) == ("new", 1.0)


def test_a_truncated_file_of_embeddings_says_what_to_do(tmp_path: Path) -> None:
    OLD.save(tmp_path)
    [file] = tmp_path.glob("*.npy")
    file.write_bytes(b"")
    with pytest.raises(QCFuseError, match="remove that folder and run `qcfuse warm run`"):
        PassageIndex.load(tmp_path)


@pytest.mark.parametrize("token", ["../../elsewhere/1", "/etc/1", "", 7, None])
def test_an_index_names_no_files_but_its_own(tmp_path: Path, token: object) -> None:
    (tmp_path / "passages-..").mkdir()
    folder = tmp_path / "passages"
    OLD.save(folder)
    [own] = folder.glob("*.npy")
    (folder / METADATA).write_text(json.dumps({"embedder": "M", "files": token}))
    with pytest.raises(QCFuseError, match="cannot read"):
        PassageIndex.load(folder)
    assert own.exists()


def test_text_that_cannot_be_written_leaves_no_part(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "file", "half of a character: \ud800")
    assert list(tmp_path.iterdir()) == []


def test_the_log_counts_passages_and_returns_past_retrievals_without_texts(tmp_path: Path) -> None:
    log = RetrievalLog(tmp_path)
    log.note(["a", "b"])
    log.note(["b", "the council meets", "gone"])
    again = RetrievalLog(tmp_path)
    assert again.counts(["a", "b", "the council meets", "never"]) == [1, 2, 1, 0]
    assert again.retrievals(["the council meets", "b", "a"]) == [[2, 1], [1, 0]]
    assert again.retrievals(["a", "b", "a"])[0] == [0, 1], "a passage of two documents has its first index"
    [file] = tmp_path.iterdir()
    assert "council" not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0, "for its owner only"


def test_unreadable_lines_are_skipped(tmp_path: Path) -> None:
    log = RetrievalLog(tmp_path)
    log.note(["a"])
    [file] = tmp_path.iterdir()
    with file.open("ab") as end:
        end.write(b'{"no": 1}\n[1]\n["half a\n\xff\xfe\n')
    log.note(["a"])
    assert log.counts(["a"]) == [2]


def test_it_keeps_the_last_ones_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 6 * 37)  # a line of one passage has 37 bytes
    log = RetrievalLog(tmp_path)
    for text in "abcdefgh":
        log.note([text])
        [file] = tmp_path.iterdir()
        assert file.stat().st_size <= 6 * 37
    assert log.counts("abcdefgh") == [0, 0, 0, 0, 0, 1, 1, 1]


def test_an_unusable_folder_has_no_log(tmp_path: Path) -> None:
    log = RetrievalLog(tmp_path / "missing")
    log.note(["a"])
    assert (log.counts(["a"]), log.retrievals(["a"])) == ([0], [])


def test_what_vanished_from_the_folders_is_forgotten_and_what_was_just_read_is_not(tmp_path: Path) -> None:
    """A record of a JSON lines file may be called like a file that is not there."""
    names = ["stays.txt", "deleted.txt", "became-a-folder.txt", "read-as-a-record.pdf", "became-empty.txt"]
    stays, deleted, replaced, record, empty = sources = [str(tmp_path / name) for name in names]
    for source in (stays, empty):
        Path(source).touch()
    Path(replaced).mkdir()
    index = PassageIndex("M", [IndexedPassage(source, "text") for source in [*sources, "/elsewhere/gone.txt"]])
    passages = {stays: ["text"], record: ["text"], empty: []}
    assert vanished_files(index, [tmp_path], passages) == {deleted, replaced, empty}
