"""The retrieval log: its counts, its size limit, and its tolerance of errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from qcfuse_rag import FusionEngine
from qcfuse_rag.library import index as module
from qcfuse_rag.library.index import RetrievalLog
from qcfuse_rag.methods.captures.slots import context_of
from qcfuse_rag.methods.fusionrag import ENRICHED
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import hash_ids
from tests.support.passages import PASSAGES


def test_it_counts_passages_and_returns_past_retrievals(tmp_path: Path) -> None:
    log = RetrievalLog(tmp_path)
    log.note(["a", "b"])
    log.note(["b", "c", "gone"])
    again = RetrievalLog(tmp_path)
    assert again.counts(["a", "b", "c", "never"]) == [1, 2, 1, 0]
    assert again.retrievals(["c", "b", "a"]) == [[2, 1], [1, 0]]


def test_no_text_is_in_the_file(tmp_path: Path) -> None:
    RetrievalLog(tmp_path).note(["the council meets"])
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


def test_a_passage_of_two_documents_has_its_first_index(tmp_path: Path) -> None:
    log = RetrievalLog(tmp_path)
    log.note(["a", "b"])
    assert log.retrievals(["a", "b", "a"]) == [[0, 1]]


def test_an_unusable_folder_has_no_log(tmp_path: Path) -> None:
    log = RetrievalLog(tmp_path / "missing")
    log.note(["a"])
    assert (log.counts(["a"]), log.retrievals(["a"])) == ([0], [])


def test_passages_retrieved_together_are_neighbours_before_similar_ones(engine: FusionEngine) -> None:
    """Only passages that all its readers may read are neighbours, whatever was retrieved together."""
    ids = [engine.prompts.chunk_ids(text) for text in PASSAGES]
    names = [hash_ids(chunk) for chunk in ids]

    def neighbours_of(index: int) -> tuple[str, ...]:
        chunk = engine.store.get(engine.corpus.keys(ids[index], (ENRICHED,))[0])
        assert isinstance(chunk, ChunkKV)
        context = context_of(chunk)
        assert context is not None
        return context

    engine.warm(PASSAGES, bases=(ENRICHED,))
    similar = neighbours_of(0)
    assert set(similar) == {names[1], names[2]}
    last = names.index(similar[-1])
    engine.store.clear()
    engine.warm(PASSAGES, bases=(ENRICHED,), retrievals=[[0, last], [last, 0, 0], [1, 2]])
    assert neighbours_of(0) == (similar[1], similar[0])
    engine.store.clear()
    sources = ["a", "b", "c"]
    engine.warm(
        PASSAGES, bases=(ENRICHED,), sources=sources, access={sources[last]: "board"}, retrievals=[[0, last]] * 3
    )
    assert neighbours_of(0) == (similar[0],)
