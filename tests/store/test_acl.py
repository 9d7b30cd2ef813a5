"""Access control: a cache is built only on passages that all its readers may read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qcfuse_rag import DiskStore, FusionEngine, LanguageModel, MemoryStore, SamplingParams, make_method
from qcfuse_rag.ingestion.similarity import nearest_chunks
from qcfuse_rag.methods.captures.slots import context_of
from qcfuse_rag.methods.fusionrag import ENRICHED, permitted_neighbours
from qcfuse_rag.methods.relaycaching import store_answer
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.documents.sources import may_be_built_on, tags_of
from qcfuse_rag.store.key import FRAMED, ChunkKey
from tests.support.engines import capture, make_engine
from tests.support.passages import PASSAGES

OPEN, BOARD, STAFF = frozenset({""}), frozenset({"board"}), frozenset({"staff"})
SECRET = "The code of the vault is four nine one seven."


@pytest.fixture
def engine(llama: LanguageModel, tmp_path: Path) -> Iterator[FusionEngine]:
    with DiskStore(tmp_path / "kv") as store:
        yield make_engine(llama, store)


def enriched(engine: FusionEngine, text: str) -> ChunkKV:
    found = engine.store.get(key_of(engine, text))
    assert isinstance(found, ChunkKV), f"{text!r} is not stored enriched: {found}"
    return found


def key_of(engine: FusionEngine, text: str) -> ChunkKey:
    return engine.corpus.keys(engine.prompts.chunk_ids(text), [ENRICHED])[0]


def same(chunk: ChunkKV, other: ChunkKV) -> bool:
    pairs = (zip(chunk.layer(layer), other.layer(layer), strict=True) for layer in range(chunk.n_layers))
    return all(torch.equal(a, b) for pair in pairs for a, b in pair)


def test_who_may_be_remembered_by_whom() -> None:
    assert may_be_built_on(BOARD, BOARD)
    assert may_be_built_on(BOARD, OPEN)
    assert may_be_built_on(BOARD, BOARD | STAFF)
    assert not may_be_built_on(BOARD, frozenset()), "nobody knows who may read what no document has"
    assert not may_be_built_on(BOARD | STAFF, BOARD), "the staff reads the passage too"
    assert not may_be_built_on(OPEN, BOARD)
    assert not may_be_built_on(frozenset(), BOARD)


def test_neighbours_are_searched_among_those_that_may_be_remembered() -> None:
    vectors = np.array([[1, 0], [1, 0.1], [1, 0.2], [0, 1]], np.float32)
    readers = [STAFF, BOARD, OPEN, STAFF]
    assert nearest_chunks(vectors, 2) == [[1, 2], [2, 0], [1, 0], [2, 1]]
    assert nearest_chunks(vectors, 2, readers) == [[2, 3], [2], [], [2, 0]]
    assert permitted_neighbours([[1, 2], [2, 0], [1, 0], [2, 1]], readers) == [[2], [2], [], [2]]


@given(
    st.lists(st.sampled_from([OPEN, BOARD, STAFF, BOARD | STAFF, frozenset()]), min_size=2, max_size=6),
    st.integers(0, 9),
)
def test_both_filters_agree(readers: list[frozenset[str]], seed: int) -> None:
    vectors = np.random.default_rng(seed).normal(size=(len(readers), 4)).astype(np.float32)
    everybody = nearest_chunks(vectors, len(readers))
    assert nearest_chunks(vectors, len(readers), readers) == permitted_neighbours(everybody, readers)


def test_a_forbidden_neighbour_leaves_no_trace(llama: LanguageModel) -> None:
    """The cache beside a secret is, bit for bit, the cache of a world without it."""
    texts, sources = [*PASSAGES, SECRET], ["a", "a", "b", "vault"]
    neighbours = [[3, 1], [0, 3], [3, 0], [0, 1]]
    guarded, without, open_ = (make_engine(llama, MemoryStore()) for _ in range(3))
    guarded.warm(
        texts, sources=sources, bases=(ENRICHED,), neighbours=neighbours, access={"vault": "board"}, batch_tokens=1
    )
    without.warm(PASSAGES, bases=(ENRICHED,), neighbours=[[1], [0], [0]], batch_tokens=1)
    open_.warm(texts, sources=sources, bases=(ENRICHED,), neighbours=neighbours, batch_tokens=1)
    for text in PASSAGES:
        assert same(enriched(guarded, text), enriched(without, text))
        assert not same(enriched(open_, text), enriched(without, text)), "without a tag the secret is in it"
    assert context_of(enriched(guarded, SECRET)) is not None
    assert len(context_of(enriched(guarded, SECRET)) or ()) == 2, "the board's passage may remember what all may read"


def test_a_document_that_is_restricted_later_takes_with_it_what_remembers_it(engine: FusionEngine) -> None:
    engine.warm(
        [*PASSAGES, SECRET], sources=["a", "a", "b", "vault"], bases=(ENRICHED,), neighbours=[[3], [0], [0], [0]]
    )
    assert engine.corpus.open_sources().restrict("vault", "board") == 1
    assert key_of(engine, PASSAGES[0]) not in engine.store
    assert key_of(engine, PASSAGES[1]) in engine.store
    assert key_of(engine, SECRET) in engine.store, "its own readers may see what it remembers"


def test_a_passage_with_new_readers_is_enriched_anew(engine: FusionEngine) -> None:
    """A passage of the board has met its secret; when the staff gets the same text, that cache must not serve it."""
    shared, tags = PASSAGES[0], {"vault": "board", "minutes": "board"}
    engine.warm([shared, SECRET], sources=["minutes", "vault"], bases=(ENRICHED,), neighbours=[[1], [0]], access=tags)
    before = enriched(engine, shared).copied()
    assert len(context_of(before) or ()) == 1
    engine.warm([shared], sources=["handbook"], bases=(ENRICHED,), neighbours=[[]], access={"handbook": "staff"})
    assert not same(enriched(engine, shared), before)
    assert context_of(enriched(engine, shared)) == ()


def test_a_passage_whose_open_copy_is_gone_is_no_longer_remembered_by_others(engine: FusionEngine) -> None:
    texts, sources = [PASSAGES[0], SECRET, SECRET], ["a", "leaflet", "vault"]
    engine.warm(texts, sources=sources, bases=(ENRICHED,), neighbours=[[1], [0], [0]], access={"vault": "board"})
    assert len(context_of(enriched(engine, PASSAGES[0])) or ()) == 1, "everybody may read it, in the leaflet"
    engine.forget("leaflet")
    assert key_of(engine, PASSAGES[0]) not in engine.store
    assert key_of(engine, SECRET) in engine.store


@pytest.mark.parametrize("meanwhile", ["forgotten", "restricted"])
@pytest.mark.parametrize("how", ["enriched", "captured"])
def test_what_was_being_computed_behind_a_passage_goes_with_it_too(
    llama: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, meanwhile: str
) -> None:
    """Its entry is written when the passage is gone already, by a server in another thread, say."""
    with DiskStore(tmp_path / "kv") as store, DiskStore(tmp_path / "kv") as beside:
        engine, server = make_engine(llama, store), make_engine(llama, beside)
        engine.warm([PASSAGES[0], SECRET], sources=["a", "vault"], bases=(FRAMED,))
        framed, put = {entry.address for entry in store.entries()}, store.put

        def put_late(*given: Any, **options: Any) -> None:
            if meanwhile == "forgotten":
                server.forget("vault")
            else:
                server.corpus.open_sources().restrict("vault", "board")
            put(*given, **options)

        monkeypatch.setattr(store, "put", put_late)
        if how == "enriched":
            engine.warm([PASSAGES[0]], sources=["a"], bases=(ENRICHED,), neighbours=[[1]], others=[SECRET])
        else:
            capture(engine, [[SECRET, PASSAGES[0]]])
        assert {entry.address for entry in store.entries()} <= framed


@pytest.mark.parametrize("how", ["enriched", "captured", "as a difference"])
def test_a_passage_that_was_forgotten_before_its_turn_came_is_not_remembered(engine: FusionEngine, how: str) -> None:
    """A job is planned at once and may run for hours."""
    engine.warm([PASSAGES[0], SECRET], sources=["a", "vault"], bases=(FRAMED,))
    ids = engine.prompts.chunk_ids(PASSAGES[0])
    if how == "enriched":
        job = engine.corpus.warm_job([ids], bases=(ENRICHED,), neighbours=[[1]], others=[SECRET])
        engine.forget("vault")
        job.run()
        assert key_of(engine, PASSAGES[0]) not in engine.store
        return

    def groups() -> Iterator[list[str]]:
        engine.forget("vault")
        yield [SECRET, PASSAGES[0]]

    before = sum(1 for _ in engine.store.entries())
    summary = capture(engine, groups(), keep=("variant",) if how == "captured" else ("difference",))
    assert summary.failed == ((0, "a passage was forgotten meanwhile"),)
    assert sum(1 for _ in engine.store.entries()) == before - 1, "the secret's own"


def test_a_capture_that_met_a_secret_is_not_kept(engine: FusionEngine) -> None:
    sources = ["a", "vault"]
    engine.warm([PASSAGES[0], SECRET], sources=sources, bases=(FRAMED,), access={"vault": "board"})
    before = sum(1 for _ in engine.store.entries())
    capture(engine, [[SECRET, PASSAGES[0]]])
    assert sum(1 for _ in engine.store.entries()) == before
    capture(engine, [[PASSAGES[0], SECRET]])
    assert sum(1 for _ in engine.store.entries()) == before + 1, "the other way round is allowed"


def test_access_outlives_the_process_the_document_and_who_names_nobody(llama: LanguageModel, tmp_path: Path) -> None:
    with DiskStore(tmp_path / "kv") as store:
        engine = make_engine(llama, store)
        engine.warm([SECRET], sources=["vault"], access={"vault": "board"})
        engine.forget("vault")
    with DiskStore(tmp_path / "kv") as store:
        again = make_engine(llama, store)
        again.warm([SECRET, PASSAGES[0]], sources=["vault", "a"], bases=(ENRICHED,), neighbours=[[1], [0]])
        assert context_of(enriched(again, PASSAGES[0])) == ()
        again.warm([SECRET], sources=["vault"], access={"vault": None})
        assert not again.corpus.open_sources().has_restricted()


def test_what_no_document_has_is_remembered_by_nobody_once_there_are_tags(engine: FusionEngine) -> None:
    """It may be the text of a restricted document that was never warmed under this model."""
    engine.warm([PASSAGES[0]], sources=["a"], access={"vault": "board"})
    engine.warm([PASSAGES[0]], sources=["a"], bases=(ENRICHED,), neighbours=[[1]], others=[SECRET])
    assert context_of(enriched(engine, PASSAGES[0])) == ()
    capture(engine, [[SECRET, PASSAGES[0]]])
    assert not any("variant" in engine.store.open(e.address)[0].base for e in engine.store.entries())  # type: ignore[index,union-attr]


def test_an_answer_over_a_restricted_passage_is_not_kept(engine: FusionEngine) -> None:
    engine.warm([PASSAGES[0], SECRET], sources=["a", "vault"], access={"vault": "board"})
    stream = engine.stream(
        engine.prompt("Which code?", [SECRET]), SamplingParams(max_new_tokens=4), method=make_method("full")
    )
    kept = store_answer(engine.corpus.entry_writer(), stream)
    assert kept.key is None
    assert "some readers of the answer must not read" in str(kept.reason)


def test_an_answer_beside_turns_that_may_quote_a_restricted_passage_is_not_kept(engine: FusionEngine) -> None:
    engine.warm([PASSAGES[0], SECRET], sources=["a", "vault"], access={"vault": "board"})
    quoted = {"role": "assistant", "content": f"Cut short, so that it is not recognised: {SECRET[3:-3]}"}
    prompt = engine.prompt("Which code?", [PASSAGES[0]], later=[quoted])
    stream = engine.stream(prompt, SamplingParams(max_new_tokens=4), method=make_method("full"))
    kept = store_answer(engine.corpus.entry_writer(), stream)
    assert kept.key is None
    assert "may contain passages with restricted access" in str(kept.reason)


@pytest.mark.parametrize(("own", "other"), [(OPEN, BOARD), (BOARD, STAFF), (BOARD, BOARD | STAFF), (STAFF, OPEN)])
def test_an_entry_made_under_no_rule_goes_if_the_rule_forbids_it_now(
    engine: FusionEngine, own: frozenset[str], other: frozenset[str]
) -> None:
    pairs = [(PASSAGES[0], f"own {tag}", tag) for tag in own] + [(SECRET, f"other {tag}", tag) for tag in other]
    texts, sources = [text for text, _, _ in pairs], [source for _, source, _ in pairs]
    first = texts.index(SECRET)
    engine.warm(texts, sources=sources, bases=(ENRICHED,), neighbours=[[first] if t != SECRET else [] for t in texts])
    for _, source, tag in pairs:
        engine.corpus.open_sources().restrict(source, tag or None)
    assert (key_of(engine, PASSAGES[0]) in engine.store) == may_be_built_on(own, other)


def test_a_document_has_the_tag_of_whichever_piece_has_one() -> None:
    board, open_, silent = {"group": "board"}, {"group": ""}, {"page": 1}
    assert tags_of([("a", board), ("a", silent), ("b", open_), (None, board)], "group") == {"a": "board", "b": None}
    assert tags_of([("a", open_), ("a", board), ("a", open_)], "group") == {"a": "board"}
    assert tags_of([("a", silent)], "group") == {}, "nothing is said of it: it keeps what it had"
    assert tags_of([("a", board)], None) is None
    with pytest.raises(ValueError, match="different tags under 'group'"):
        tags_of([("a", board), ("a", {"group": "staff"})], "group")
