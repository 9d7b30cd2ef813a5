"""A warming job: its plan, its result, the order of its work, and its state after a crash."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qcfuse_rag import DiskStore, FusionEngine, LanguageModel, MemoryStore, make_method
from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.ingestion import warm_job
from qcfuse_rag.ingestion.batches import batches_by_length, plan_batches
from qcfuse_rag.ingestion.prefill import PendingChunk, PrefillTarget, instruction_ids, prefill_chunk
from qcfuse_rag.ingestion.warm_job import WarmJob
from qcfuse_rag.methods.captures.slots import context_of
from qcfuse_rag.methods.fusionrag import ENRICHED
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.entry.codec import entry_bytes
from qcfuse_rag.store.key import BLIND, FRAMED, PRIMED, hash_ids
from tests.support.engines import capture, make_engine, stored_chunk
from tests.support.passages import PASSAGES

MANY = [f"{PASSAGES[i % 3]} Number {i}." * (1 + i % 4) for i in range(12)]


@pytest.fixture
def engine(llama: LanguageModel, tmp_path: Path) -> FusionEngine:
    return make_engine(llama, DiskStore(tmp_path / "kv"))


def ids_of(engine: FusionEngine, texts: list[str]) -> list[tuple[int, ...]]:
    return [engine.prompts.chunk_ids(text) for text in texts]


def test_a_plan_is_what_the_run_then_does(engine: FusionEngine) -> None:
    engine.warm(MANY[:3])
    job = engine.corpus.warm_job(ids_of(engine, MANY))
    plan, before = job.plan(measure=True), engine.store.stats()[0]
    assert engine.store.stats()[0].entries == before.entries, "a plan stores nothing"
    summary = job.run()
    assert (plan.chunks, plan.present, plan.to_warm, plan.tokens) == (12, 3, 9, summary.tokens)
    assert summary.warmed == 9
    grown = engine.store.stats()[0].size_bytes - before.size_bytes
    assert abs(plan.size_bytes - grown) < 0.1 * grown
    assert plan.seconds is not None
    assert 0 < plan.seconds < 60


def test_the_primer_counts_once_in_a_plans_time(llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0

    def slow(*args: Any, **options: Any) -> ChunkKV:
        nonlocal clock
        clock += 1
        return prefill_chunk(*args, **options)

    engine = make_engine(llama, MemoryStore(), method=make_method("auto"))
    job = engine.corpus.warm_job(ids_of(engine, MANY), bases=(PRIMED,), batch_tokens=1)
    monkeypatch.setattr("qcfuse_rag.ingestion.prefill.prefill_chunk", slow)
    monkeypatch.setattr(warm_job.time, "perf_counter", lambda: clock)
    assert job.plan(measure=True).seconds == 1, "and not once for each of 12 batches"


def test_a_plan_of_an_empty_store_does_not_store_the_system_prefix(engine: FusionEngine) -> None:
    engine.corpus.warm_job(ids_of(engine, MANY)).plan(measure=True)
    assert engine.store.stats()[0].entries == 0


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_entries_take_what_was_estimated(llama: LanguageModel, tmp_path: Path, kv_dtype: str) -> None:
    store = DiskStore(tmp_path, kv_dtype=kv_dtype)
    engine = make_engine(llama, store)
    engine.warm(MANY)
    sizes = {entry.address: entry.size_bytes for entry in store.entries()}
    for ids in ids_of(engine, MANY):
        [key] = engine.corpus.keys(ids, [FRAMED])
        estimated = entry_bytes(llama.shapes, llama.dtype, kv_dtype, len(ids))
        assert -4096 <= sizes[key.address] - estimated <= 4096


def test_the_most_wanted_come_first(engine: FusionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    ids = ids_of(engine, MANY)
    keys = [engine.corpus.keys(chunk, [FRAMED])[0] for chunk in ids]
    priority = [float(i % 5) for i in range(12)]

    def note(done: int, total: int) -> None:
        order.extend(i for i, key in enumerate(keys) if key in engine.store and i not in order)

    # otherwise sorted by length within 32 batches
    monkeypatch.setattr("qcfuse_rag.ingestion.batches.BATCHES_PER_GROUP", 1)
    engine.corpus.warm_job(ids, priority=priority, batch_tokens=1).run(note)
    wanted = [priority[i] for i in order]
    assert wanted == sorted(priority, reverse=True)


def test_a_store_too_small_for_all_keeps_the_most_wanted(llama: LanguageModel, tmp_path: Path) -> None:
    probe = make_engine(llama, MemoryStore())
    ids = ids_of(probe, MANY)
    sizes = [entry_bytes(llama.shapes, llama.dtype, "model", len(chunk)) for chunk in ids]
    with DiskStore(tmp_path, limit_bytes=sum(sizes) // 2) as store:
        engine = make_engine(llama, store)
        priority = [float(i) for i in range(12)]
        summary = engine.warm(MANY, priority=priority)
        kept = [engine.corpus.keys(chunk, [FRAMED])[0] in store for chunk in ids]
        assert summary.left_out > 0
        assert summary.warmed + summary.left_out == 12
        assert store.stats()[0].evicted == 0, "nothing warmed is evicted for something less wanted"
        assert kept[11], "the most wanted of all"
        assert not kept[0], "the least wanted of all"
        assert engine.corpus.warm_job(ids, priority=priority).plan().left_out == summary.left_out


def test_little_padding_is_computed(engine: FusionEngine) -> None:
    """Batches have chunks of similar length, so padding stays a small share."""
    summary = engine.warm(MANY, batch_tokens=400)
    ranking = len(MANY) * len(instruction_ids(engine.lm.tokenizer))
    assert summary.computed_tokens - ranking < 1.15 * summary.tokens


@given(lengths=st.lists(st.integers(1, 500), max_size=200), bound=st.integers(1, 2000), extra=st.integers(0, 20))
def test_batches_hold_everything_once_within_their_bound(lengths: list[int], bound: int, extra: int) -> None:
    items = list(enumerate(lengths))
    batches = list(batches_by_length(items, lambda item: item[1], batch_tokens=bound, extra=extra))
    assert sorted(item for batch in batches for item in batch) == items
    for batch in batches:
        assert len(batch) == 1 or len(batch) * (max(n for _, n in batch) + extra) <= bound


def test_copies_of_a_primer_are_bounded(engine: FusionEngine) -> None:
    """Each chunk of a primed batch has a copy of the primer in front, so such batches have fewer chunks."""
    target = PrefillTarget(engine.lm, engine.store, engine.prompts.prefix_ids)
    primer_tokens, batch_tokens = 800, 2048
    chunks = [tuple(range(index, index + 50)) for index in range(100)]
    work = [
        PendingChunk(index, base, target.key(base, ids), array("i", ids))
        for base in (FRAMED, PRIMED)
        for index, ids in enumerate(chunks)
    ]
    batches = list(plan_batches(work, batch_tokens=batch_tokens, extra=0, primer_tokens=primer_tokens))
    sizes = {base: {len(batch.chunks) for batch in batches if batch.base is base} for base in (FRAMED, PRIMED)}
    assert sum(len(batch.chunks) for batch in batches) == len(work)
    assert max(sizes[FRAMED]) == batch_tokens // 50
    assert max(sizes[PRIMED]) == batch_tokens // (50 + primer_tokens // 4)


def test_the_time_of_the_prefill_is_stored_as_the_saving_of_a_use(engine: FusionEngine) -> None:
    engine.warm(MANY)
    saved = [entry.saved_ms for entry in engine.store.entries()]
    assert all(ms is not None and 0 < ms < 60_000 for ms in saved)
    assert len(set(saved)) > 1


def test_quantized_stores_do_not_prefill_behind_a_quantized_system_prefix(llama: LanguageModel) -> None:
    """Otherwise a chunk's bytes would depend on whether the prefix had been stored before."""
    once, twice = (make_engine(llama, MemoryStore(kv_dtype="int8")) for _ in range(2))
    once.warm(MANY[:2], batch_tokens=1)
    twice.warm(MANY[:1], batch_tokens=1)
    twice.warm(MANY[:2], batch_tokens=1)
    first, second = (stored_chunk(engine, MANY[1]) for engine in (once, twice))
    assert all((first.blocks[name] == second.blocks[name]).all() for name in first.names())


def test_bad_arguments_are_refused_at_once(engine: FusionEngine) -> None:
    with pytest.raises(ValueError, match="1 sources for 2 passages"):
        engine.warm(MANY[:2], sources=["a"])
    with pytest.raises(ValueError, match="1 priorities for 2 chunks"):
        engine.warm(MANY[:2], priority=[1.0])


def test_entries_of_a_stopped_job_are_deleted_with_their_document(engine: FusionEngine) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.warm(MANY, sources=["a"] * len(MANY), batch_tokens=1, progress=stop)
    before = {entry.address for entry in engine.store.entries()}
    assert engine.forget("a") == 1
    assert len(before) - sum(1 for _ in engine.store.entries()) == 1, "all but the system prefix"


@pytest.mark.parametrize("error", [OSError("the disk is gone"), CorruptEntry("damaged")], ids=["disk", "damage"])
def test_a_system_prefix_that_cannot_be_read_is_computed_again(
    engine: FusionEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine.warm(MANY[:1])

    def unreadable(_: ChunkKV) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(ChunkKV, "read", unreadable)
        assert engine.warm(MANY[:2]).warmed == 1
    fresh = make_engine(engine.lm, MemoryStore())
    fresh.warm(MANY[1:2])
    ours, expected = (stored_chunk(each, MANY[1]) for each in (engine, fresh))
    assert all(torch.equal(ours.blocks[name], expected.blocks[name]) for name in expected.names())


def test_a_summary_is_plain_data(engine: FusionEngine) -> None:
    data = json.loads(json.dumps(engine.warm(MANY[:2]).to_dict()))
    assert data["tokens_per_s"] > 0
    job = WarmJob(PrefillTarget(engine.lm, engine.store, engine.prompts.prefix_ids), [], bases=(FRAMED,))
    assert json.loads(json.dumps(job.plan().to_dict()))["chunks"] == 0
    assert job.run().warmed == 0


def test_a_passage_is_enriched_again_when_most_of_its_neighbours_are_new(engine: FusionEngine) -> None:
    """A new passage is enriched at once, others when more than half of their neighbours are new."""
    texts = [text[-80:] for text in MANY[:6]]  # three of them fit in front of a fourth
    engine.warm(texts[:4], bases=(ENRICHED,), neighbours=[[1, 2, 3], [0], [0], [0]])
    [key] = engine.corpus.keys(engine.prompts.chunk_ids(texts[0]), [ENRICHED])
    old = engine.corpus.open_sources().derivations.origins(key)
    one_new = engine.warm(texts[:5], bases=(ENRICHED,), neighbours=[[1, 2, 4], [0], [0], [0], [0]])
    assert (one_new.refreshed, one_new.stalest) == (0, pytest.approx(1 / 3))
    assert one_new.warmed == 2, "the new passage, framed and enriched"
    assert engine.corpus.open_sources().derivations.origins(key) == old
    two_new = engine.warm(texts, bases=(ENRICHED,), neighbours=[[1, 4, 5], [0], [0], [0], [0], [0]])
    assert (two_new.refreshed, two_new.stalest) == (1, 0.0)
    assert engine.corpus.open_sources().derivations.origins(key) != old
    again = engine.warm(texts, bases=(ENRICHED,), neighbours=[[1, 4, 5], [0], [0], [0], [0], [0]])
    assert (again.warmed, again.refreshed) == (0, 0)


def test_a_plan_says_what_would_be_refreshed(engine: FusionEngine) -> None:
    engine.warm(MANY[:3], bases=(ENRICHED,), neighbours=[[1], [0], [0]])
    job = engine.corpus.warm_job(ids_of(engine, MANY[:3]), bases=(ENRICHED,), neighbours=[[2], [0], [0]])
    assert (job.plan().to_warm, job.plan().to_refresh) == (1, 1)


def test_neighbours_are_chosen_by_the_vectors(engine: FusionEngine) -> None:
    vectors = np.eye(4, dtype=np.float32)[[0, 1, 0, 1]] + np.float32(0.01)
    engine.warm(MANY[:4], bases=(ENRICHED,), vectors=vectors)
    context = context_of(stored_chunk(engine, MANY[0], ENRICHED))
    assert context is not None
    assert context[0] == hash_ids(engine.prompts.chunk_ids(MANY[2]))


def test_a_part_of_the_corpus_does_not_make_enriched_passages_stale(engine: FusionEngine) -> None:
    engine.warm(MANY[:4], bases=(ENRICHED,), neighbours=[[1, 2, 3], [0], [0], [0]])
    again = engine.warm([MANY[0], MANY[4]], bases=(ENRICHED,), neighbours=[[1], [0]])
    assert (again.refreshed, again.warmed) == (0, 2), "the new passage, framed and enriched"


def test_the_number_of_vectors_must_be_the_number_of_passages(engine: FusionEngine) -> None:
    with pytest.raises(ValueError, match="2 vectors for 3 passages"):
        engine.warm(MANY[:2], bases=(ENRICHED,), vectors=np.eye(2, dtype=np.float32), others=[MANY[2]])


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_bytes_are_counted_in_the_stores_format(llama: LanguageModel, kv_dtype: str) -> None:
    engine = make_engine(llama, MemoryStore(kv_dtype=kv_dtype))
    summary = engine.warm(PASSAGES, bases=[BLIND])
    keys = [BLIND.key(llama.fingerprint, (), ids) for ids in ids_of(engine, PASSAGES)]
    stored = {entry.address: entry.size_bytes for entry in engine.store.entries()}
    assert summary.size_bytes == sum(stored[key.address] for key in keys)
    before = sum(stored.values())
    captured = capture(engine, [PASSAGES])
    assert captured.size_bytes == engine.store.stats()[0].size_bytes - before


def test_a_passage_that_is_too_long_is_named_once_and_not_if_it_fits_without_the_primer(llama: LanguageModel) -> None:
    target = PrefillTarget(llama, MemoryStore(), (1, 2, 3), primer=(4,) * 100)
    chunks = [(5,) * length for length in (20, llama.context_window.tokens - 50, llama.context_window.tokens)]
    summary = WarmJob(target, chunks, bases=[BLIND, FRAMED, PRIMED]).run()
    assert (summary.chunks, summary.warmed) == (9, 6)
    assert [index for index, _ in summary.failed] == [2]
