"""FusionRAG's enriched caches, other bases and rankings of methods, against the forward pass of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, choose_method, make_method
from qcfuse_rag.ingestion.prefill import instruction_ids, prefill_chunk, prefill_chunks
from qcfuse_rag.ingestion.similarity import nearest_chunks, token_vectors
from qcfuse_rag.methods import find_base
from qcfuse_rag.methods.epic import BEGUN
from qcfuse_rag.methods.fusionrag import ENRICHED, fit_neighbours, retrieved_together
from qcfuse_rag.methods.rankings import Ranking, ranked
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import BLIND, FRAMED
from qcfuse_rag.verification.exactness import stock_attention
from tests.methods.test_methods import attention_of_question, best
from tests.support import references
from tests.support.engines import make_engine, stored_chunk
from tests.support.passages import PASSAGES, QUESTION

TOLERANCE = 1e-4


@torch.inference_mode()
def behind_caches(
    lm: LanguageModel, prefix_ids: tuple[int, ...], related: list[tuple[int, ...]], length: int, ids: tuple[int, ...]
) -> references.Table:
    """Run a chunk behind the joined and cut system prefix and first-pass caches, with transformers alone."""
    tables = [references.alone_at(lm, prefix_ids, 0)]
    start = len(prefix_ids)
    for neighbour in related:
        tables.append(references.alone_at(lm, neighbour, start, before=prefix_ids))
        start += len(neighbour)
    cache = references.Cache(layer_class_to_replicate=references.DynamicLayer)
    for layer in range(lm.n_layers):
        cache.update(*(torch.cat([t[layer][kind] for t in tables], 2)[:, :, :length] for kind in (0, 1)), layer)
    positions = torch.arange(length, length + len(ids))[None]
    with stock_attention(lm):
        lm.model(input_ids=torch.tensor([ids]), position_ids=positions, past_key_values=cache, use_cache=True)
    return [(layer.keys[:, :, length:], layer.values[:, :, length:]) for layer in cache.layers]


def test_enriched_chunks_are_prefilled_behind_their_neighbours_first_pass_caches(engine: FusionEngine) -> None:
    engine.warm(PASSAGES, bases=(ENRICHED,), neighbours=[[2, 1], [], [0]])
    prefix_ids = engine.prompts.prefix_ids
    ids = [engine.prompts.chunk_ids(text) for text in PASSAGES]
    total = len(ids[2]) + len(ids[1])
    assert 64 <= total < 128, "so that it is made a multiple of four"
    start = len(prefix_ids) + total - total % 4
    expected = behind_caches(engine.lm, prefix_ids, [ids[2], ids[1]], start, ids[0])
    references.assert_chunk_is(engine.lm, stored_chunk(engine, PASSAGES[0], ENRICHED), expected, start)
    references.assert_chunk_is(
        engine.lm,
        stored_chunk(engine, PASSAGES[1], ENRICHED),
        references.alone_at(engine.lm, ids[1], len(prefix_ids), before=prefix_ids),
        len(prefix_ids),
    )
    assert stored_chunk(engine, PASSAGES[2], FRAMED).n_tokens == len(ids[2]), "the first pass is kept"


def test_a_passage_is_never_enriched_by_its_own_text_nor_twice_by_another(llama: LanguageModel) -> None:
    once, again = make_engine(llama, MemoryStore()), make_engine(llama, MemoryStore())
    once.warm(PASSAGES, bases=(ENRICHED,), neighbours=[[1, 2], [], []], batch_tokens=1)
    twice = [[2, 1, 3, 4], [], [], [], []]
    again.warm(
        [PASSAGES[0], PASSAGES[1], PASSAGES[0], *PASSAGES[1:]], bases=(ENRICHED,), neighbours=twice, batch_tokens=1
    )
    references.assert_same_layers(*(stored_chunk(engine, PASSAGES[0], ENRICHED) for engine in (once, again)))


def test_enrichment_does_not_depend_on_what_was_stored_before(llama: LanguageModel) -> None:
    once, twice = make_engine(llama, MemoryStore()), make_engine(llama, MemoryStore())
    neighbours = [[1, 2], [2, 0], [0, 1]]
    once.warm(PASSAGES, bases=(ENRICHED,), neighbours=neighbours, batch_tokens=1)
    for _ in range(2):
        twice.warm(PASSAGES[:2], bases=(FRAMED,), batch_tokens=1)
        twice.warm(PASSAGES, bases=(ENRICHED, BLIND), neighbours=neighbours, batch_tokens=1)
    for text in PASSAGES:
        references.assert_same_layers(*(stored_chunk(engine, text, ENRICHED) for engine in (once, twice)))


def test_enriched_chunks_are_never_taken_for_exact(engine: FusionEngine) -> None:
    """Not even directly behind the system prefix, because their neighbours are not in the prompt."""
    engine.warm(PASSAGES, bases=(ENRICHED,), neighbours=[[1], [2], [0]])
    prompt = engine.prompt(QUESTION, PASSAGES)
    framed = engine.prefill(prompt, method=make_method("prophetkv", ratio=1.0, base=FRAMED)).report
    enriched = engine.prefill(prompt, method=make_method("prophetkv", ratio=1.0, base=ENRICHED)).report
    assert len(enriched.selected) == enriched.context_tokens
    assert len(framed.selected) == enriched.context_tokens - len(prompt.chunks[0])


def test_enriched_warming_without_neighbours_finds_its_own_or_says_what_it_needs(engine: FusionEngine) -> None:
    assert engine.warm(PASSAGES, bases=(ENRICHED,)).warmed == 2 * len(PASSAGES)
    with pytest.raises(ValueError, match="an enriched base needs the neighbours of all 3 chunks, got those of 1"):
        engine.corpus.warm_job([(5, 6), (7, 8), (9,)], bases=(ENRICHED,), neighbours=[[1]])


def test_neighbours_that_do_not_fit_the_window_are_left_out(engine: FusionEngine) -> None:
    long = PASSAGES[0] * 6
    engine.warm([long, PASSAGES[1], PASSAGES[2]], bases=(ENRICHED,), neighbours=[[], [2, 0, 0, 0], []])
    prefix_ids = engine.prompts.prefix_ids
    ids = [engine.prompts.chunk_ids(text) for text in (long, PASSAGES[1], PASSAGES[2])]
    fitting = [ids[2]]
    while len(prefix_ids) + sum(map(len, fitting)) + len(ids[0]) + len(ids[1]) <= engine.lm.context_window.tokens:
        fitting.append(ids[0])
    assert len(fitting) < 4
    lengths = list(map(len, fitting))
    start = fit_neighbours(len(ids[1]), len(prefix_ids), lengths, engine.lm.context_window.tokens).length
    expected = behind_caches(engine.lm, prefix_ids, fitting, start, ids[1])
    references.assert_chunk_is(engine.lm, stored_chunk(engine, PASSAGES[1], ENRICHED), expected, start)


def test_chunks_with_prefixes_of_the_same_length_are_enriched_together(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same result as alone."""
    batches: list[int] = []

    def counted(lm: LanguageModel, batch: list[tuple[int, ...]], **rest: Any) -> list[ChunkKV]:
        batches.append(len(batch))
        return prefill_chunks(lm, batch, **rest)

    monkeypatch.setattr("qcfuse_rag.methods.fusionrag.prefill_chunks", counted)
    texts = [*PASSAGES, PASSAGES[0] + " Then they went home.", PASSAGES[1] + " It rained."]
    neighbours = [[1, 2], [0, 2], [0, 1], [1, 2], [1, 2]]
    alone, together = make_engine(llama, MemoryStore()), make_engine(llama, MemoryStore())
    alone.warm(texts, bases=(ENRICHED,), neighbours=neighbours, batch_tokens=1)
    assert batches == [1] * 5
    together.warm(texts, bases=(ENRICHED,), neighbours=neighbours)
    assert max(batches[5:]) > 1
    assert sum(batches[5:]) == 5
    for text in texts:
        ours, theirs = (stored_chunk(engine, text, ENRICHED) for engine in (together, alone))
        assert ours.notes == theirs.notes
        references.assert_same_layers(ours, theirs, TOLERANCE)


@given(st.lists(st.integers(1, 700), max_size=12), st.integers(0, 300), st.integers(1, 600), st.integers(300, 9000))
def test_the_prefix_of_an_enriched_chunk_fits_and_is_cut_by_a_sixteenth_at_most(
    lengths: list[int], prefix_tokens: int, tokens: int, window: int
) -> None:
    prefix = fit_neighbours(tokens, prefix_tokens, lengths, window)
    uncut = sum(lengths[: prefix.neighbours])
    length = prefix.length - prefix_tokens
    assert prefix.neighbours == 0 or prefix.length + tokens <= window
    assert sum(lengths[: prefix.neighbours - 1]) < length <= uncut or prefix.neighbours == length == 0
    fitting = [n for n in range(len(lengths) + 1) if prefix_tokens + sum(lengths[:n]) + tokens <= window]
    total = sum(lengths[: max(fitting, default=0)])
    assert length >= total - total / 16
    grain = next((2**n for n in range(20, -1, -1) if 2**n <= total / 16), 1)
    assert length % grain == 0


def test_prefixes_of_a_batch_have_one_length(llama: LanguageModel) -> None:
    short, long = (prefill_chunk(llama, ids) for ids in ((5, 6), (5, 6, 7)))
    for prefixes in ([short, long], [short] * 3):
        with pytest.raises(ValueError, match="one each of the same length"):
            prefill_chunks(llama, [(8, 9), (9, 8)], prefix=prefixes)


def test_begun_chunks_stand_behind_four_copies_of_the_prompts_first_token(engine: FusionEngine) -> None:
    """EPIC's LegoLink-0: nothing to recompute, because the copies are the attention sink."""
    engine.warm(PASSAGES, bases=(BEGUN,))
    ids = engine.prompts.chunk_ids(PASSAGES[0])
    expected = references.alone_at(engine.lm, ids, 4, before=engine.prompts.prefix_ids[:1] * 4)
    references.assert_chunk_is(engine.lm, stored_chunk(engine, PASSAGES[0], BEGUN), expected, 4)
    method = make_method("epic", n_tokens=0)
    assert method.base is BEGUN
    report = engine.prefill(engine.prompt(QUESTION, PASSAGES), method=method).report
    assert (report.selected, report.fallback) == ((), None)


def test_fusionrag_looks_from_the_last_layer(engine: FusionEngine) -> None:
    """The probe sees the stored chunks or none of them; works over enriched caches, and blind ones as here."""
    engine.warm(PASSAGES, bases=(BLIND,))
    prompt = engine.prompt(QUESTION, PASSAGES)
    last = engine.lm.n_layers - 1
    for probe, seen in (("question_over_cache", prompt.chunks[-1].stop), ("question_only", prompt.spans[0].stop)):
        report = engine.prefill(prompt, method=make_method("fusionrag", base=BLIND, probe=probe)).report
        scores = attention_of_question(engine.lm, prompt, [list(range(seen))] * engine.lm.n_layers, layers=[last])
        assert list(report.selected) == best(scores, prompt, int(0.15 * report.context_tokens)), probe


def test_fusionrag_takes_the_framed_cache_of_what_is_not_enriched_yet(engine: FusionEngine) -> None:
    engine.warm(PASSAGES[:2], bases=(ENRICHED,), neighbours=[[1], [0]])
    engine.warm(PASSAGES[2:], bases=(FRAMED,))
    prompt = engine.prompt(QUESTION, PASSAGES)
    report = engine.prefill(prompt, method=make_method("fusionrag")).report
    assert report.fallback is None
    assert [lookup.note for lookup in report.lookups] == [None, None, None, "framed instead of enriched"]
    without = engine.prefill(prompt, method=make_method("fusionrag", alternative=False)).report
    assert without.fallback == "1 of 3 passages computed in full: absent: stored framed, not enriched"


@pytest.mark.parametrize("ranking", ["instruction", "kvzip"])
def test_tokens_are_ranked_by_the_strongest_attention(engine: FusionEngine, ranking: Ranking) -> None:
    base = ranked(BLIND, ranking)
    engine.warm(PASSAGES, bases=(base,))
    ids, instruction = engine.prompts.chunk_ids(PASSAGES[1]), instruction_ids(engine.lm.tokenizer)
    query = instruction + ids if ranking == "kvzip" else instruction
    strongest = references.eager_attention(engine.lm, ids + query)[:, :, len(ids) :, : len(ids)].amax((1, 2))
    for order, weights in zip(
        stored_chunk(engine, PASSAGES[1], base).blocks["ranking"].tolist(), strongest, strict=True
    ):
        expected = sorted(range(4, len(ids)), key=lambda token: -float(weights[token]))
        assert order == [0, 1, 2, 3, *expected]


def test_tokens_are_ranked_by_small_keys_or_by_position(engine: FusionEngine) -> None:
    for ranking in ("knorm", "sinks"):
        engine.warm(PASSAGES, bases=(ranked(BLIND, ranking),))  # type: ignore[arg-type]
    by_norm = stored_chunk(engine, PASSAGES[0], ranked(BLIND, "knorm"))
    for layer in range(engine.lm.n_layers):
        norms = by_norm.layer(layer)[0].norm(dim=-1).mean(0)
        expected = sorted(range(4, by_norm.n_tokens), key=lambda token: float(norms[token]))
        assert by_norm.blocks["ranking"][layer].tolist() == [0, 1, 2, 3, *expected]
    in_order = stored_chunk(engine, PASSAGES[0], ranked(BLIND, "sinks")).blocks["ranking"]
    assert in_order.tolist() == [list(range(in_order.shape[1]))] * engine.lm.n_layers


def test_a_ranking_is_part_of_the_key(engine: FusionEngine) -> None:
    """Chunks with different rankings are different entries with the same keys and values."""
    engine.warm(PASSAGES, bases=(BLIND, ranked(BLIND, "kvzip")))
    assert engine.store.stats()[0].entries == 2 * len(PASSAGES) + 1
    default, kvzip = stored_chunk(engine, PASSAGES[0], BLIND), stored_chunk(engine, PASSAGES[0], ranked(BLIND, "kvzip"))
    assert float((default.layer(2)[0] - kvzip.layer(2)[0]).abs().max()) <= TOLERANCE
    assert make_method("qcfuse", anchors="kvzip").base == ranked(BLIND, "kvzip")
    assert find_base("blind+kvzip") == ranked(BLIND, "kvzip")
    prompt = engine.prompt(QUESTION, PASSAGES)
    selected = {
        kind: engine.prefill(prompt, method=make_method("qcfuse", ratio=0.2, anchors=kind)).report.selected
        for kind in ("instruction", "kvzip")
    }
    assert selected["instruction"] != selected["kvzip"]


def test_named_methods_keep_the_base_that_makes_them(engine: FusionEngine) -> None:
    assert choose_method("fusionrag").base is ENRICHED
    assert choose_method("cacheblend").base is FRAMED
    assert choose_method("cacheblend", base="blind").base is BLIND


def test_nearest_are_the_nearest_others() -> None:
    vectors = np.array([[1, 0], [0.9, 0.1], [0, 1], [-1, 0]], np.float32)
    assert nearest_chunks(vectors, 2) == [[1, 2], [0, 2], [1, 0], [2, 1]]
    assert nearest_chunks(vectors[:1], 10) == [[]]
    assert [
        len(neighbours)
        for neighbours in nearest_chunks(np.random.default_rng(0).normal(size=(2100, 3)).astype(np.float32), 10)
    ] == [10] * 2100


def test_retrieved_together_counts_pairs() -> None:
    assert retrieved_together([[0, 1, 2], [1, 0], [2, 0, 2], [3]], 5, 2) == [[1, 2], [0, 2], [0, 1], [], []]


def test_token_vectors_of_chunks_with_shared_rare_words_are_near(llama: LanguageModel) -> None:
    chunks = [(10, 11, 12, 50), (10, 11, 13, 50), (20, 21, 22, 50), (20, 21, 23, 50)]
    assert [neighbours[0] for neighbours in nearest_chunks(token_vectors(llama, chunks), 1)] == [1, 0, 3, 2]


def test_a_forgotten_document_takes_along_the_enriched_caches_of_its_neighbours(engine: FusionEngine) -> None:
    base = ENRICHED
    engine.warm(PASSAGES, bases=[base], neighbours=[[1], [2], []], sources=["ferry", "paint", "mill"])
    engine.forget("paint")
    enriched = [engine.corpus.keys(engine.prompts.chunk_ids(text), [base])[0] in engine.store for text in PASSAGES]
    framed = [engine.corpus.keys(engine.prompts.chunk_ids(text), [FRAMED])[0] in engine.store for text in PASSAGES]
    assert enriched == [False, False, True], "the ferry's remembers the paint"
    assert framed == [True, False, True]
    left = [PASSAGES[0], PASSAGES[2]]
    assert engine.warm(left, bases=[base], neighbours=[[1], []], sources=["ferry", "mill"]).warmed == 1
    assert engine.corpus.open_sources().garbage.collect() == 0
    engine.forget("mill")
    assert len(list(engine.store.entries())) == 2, "the system prefix and the ferry's framed cache"


def test_a_changed_document_does_too(engine: FusionEngine) -> None:
    engine.warm(PASSAGES, bases=[ENRICHED], neighbours=[[1], [2], []], sources=["ferry", "paint", "mill"])
    engine.warm(["The paint is blue."], sources=["paint"], bases=[ENRICHED], neighbours=[[]])
    assert engine.corpus.keys(engine.prompts.chunk_ids(PASSAGES[0]), [ENRICHED])[0] not in engine.store
