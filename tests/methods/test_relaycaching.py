"""RelayCaching: exact answers are stored, and recomputed where they deviate or matter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, Prompt, SamplingParams, make_method
from qcfuse_rag.generation.decoding import TextStream
from qcfuse_rag.methods.captures.slots import context_of
from qcfuse_rag.methods.relaycaching import GENERATED, RelayLayers, RelayRecompute, store_answer
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import FRAMED, hash_ids
from tests.support import references
from tests.support.engines import answer_of, chunk_lookups, make_engine
from tests.support.passages import PASSAGES, QUESTION
from tests.support.references import error

TOLERANCE = 1e-4
ANSWER = "The paint is kept in the old mill, which belongs to the council."
OTHER = "Who has a key, and to what?"


@pytest.fixture
def relayed(engine: FusionEngine) -> tuple[FusionEngine, Prompt, Prompt]:
    """Return an engine with a stored answer, its prompt, and a prompt in which the answer is the second passage."""
    engine.warm(PASSAGES, bases=(FRAMED,))
    old = engine.prompt(QUESTION, PASSAGES)
    assert store_answer(engine.corpus.entry_writer(), answer_of(engine, old, ANSWER)).reason is None
    return engine, old, engine.prompt(OTHER, [PASSAGES[0], ANSWER, PASSAGES[2]])


def stored(engine: FusionEngine, text: str = ANSWER) -> ChunkKV | None:
    chunk = engine.store.get(
        GENERATED.key(engine.lm.fingerprint, engine.prompts.prefix_ids, engine.prompts.chunk_ids(text))
    )
    return chunk if isinstance(chunk, ChunkKV) else None


def table_of(engine: FusionEngine, old: Prompt, prompt: Prompt) -> references.Table:
    """Compute the stored caches of a prompt by the model's own forward, the answer behind its prompt."""
    answer = engine.prompts.chunk_ids(ANSWER)
    return references.stored_table(
        engine.lm, prompt, lambda span: old.ids if span.segment.ids == answer else prompt.prefix_ids
    )


def chosen_by_hand(lm: LanguageModel, prompt: Prompt, table: references.Table, layers: RelayLayers) -> dict[int, float]:
    """Return each candidate's score relative to the thresholds: as published, 1 and more is chosen."""
    candidates = [p for span in prompt.chunks[1:] for p in range(span.start, span.stop)]
    kept = [list(range(prompt.chunks[0].stop)) + (candidates if i < layers.start else []) for i in range(lm.n_layers)]
    whole = references.whole_forward(lm, prompt.ids, table, kept)
    old, new = table[layers.detect][1][0].numpy(), whole.fresh[layers.detect][1][0].numpy()
    deviation, influence = {}, {}
    for p in candidates:
        a, b = old[:, p].reshape(-1), new[:, p].reshape(-1)
        deviation[p] = 1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        influence[p] = float(whole.attention[layers.detect, :, -10:, p].mean())
    means = np.mean(list(deviation.values())), np.mean(list(influence.values()))
    return {p: max(deviation[p] / means[0] / 1.5, influence[p] / means[1] / 1.45) for p in candidates}


def test_a_stored_answer_equals_the_models_own_forward_behind_its_prompt(family: LanguageModel) -> None:
    engine = make_engine(family, MemoryStore())
    old = engine.prompt(QUESTION, PASSAGES)
    kept = store_answer(engine.corpus.entry_writer(), answer_of(engine, old, ANSWER))
    chunk, ids, start = stored(engine), engine.prompts.chunk_ids(ANSWER), 7
    assert chunk is not None
    assert (kept.tokens, chunk.n_tokens) == (len(ids), len(ids)), "no tokens of the prompt"
    assert kept.computed == len(ids) - len(family.tokenizer(ANSWER)["input_ids"]), "only the template's tokens"
    assert context_of(chunk) == tuple(hash_ids(span.segment.ids) for span in old.chunks)
    references.assert_chunk_is(family, chunk, references.alone_at(family, ids, start, before=old.ids), start)


def test_only_exact_answers_are_stored(engine: FusionEngine) -> None:
    engine.warm(PASSAGES)
    old = engine.prompt(QUESTION, PASSAGES)
    for method in ("reuse", "qcfuse", "relaxkv"):
        kept = store_answer(engine.corpus.entry_writer(), answer_of(engine, old, ANSWER, method))
        assert kept.reason == f"an answer of method {method} may be inexact; generate it with method full"
        assert kept.key is None
    assert stored(engine) is None


def test_an_answer_over_inexact_rows_of_an_earlier_turn_is_not_stored(engine: FusionEngine) -> None:
    """A guard that refuses to fuse makes it full prefill, over what the earlier turn has left."""
    answer = answer_of(engine, engine.prompt(QUESTION, PASSAGES), ANSWER)
    stream = SimpleNamespace(prefilled=replace(answer.prefilled, exact_tokens=3), result=answer.result)
    kept = store_answer(engine.corpus.entry_writer(), stream)
    assert "may be inexact" in str(kept.reason)


def test_an_answer_is_removed_with_any_document_of_its_prompt(engine: FusionEngine) -> None:
    engine.warm(PASSAGES, sources=["ferry", "paint", "mill"])
    assert (
        store_answer(engine.corpus.entry_writer(), answer_of(engine, engine.prompt(QUESTION, PASSAGES[:2]), ANSWER)).key
        is not None
    )
    engine.forget("mill")
    assert stored(engine) is not None
    engine.forget("paint")
    assert stored(engine) is None


def test_an_answer_with_other_tokens_is_not_stored_unless_only_its_end_differs(engine: FusionEngine) -> None:
    old = engine.prompt(QUESTION, PASSAGES)
    stream = answer_of(engine, old, ANSWER)
    assert "0 of" in str(store_answer(engine.corpus.entry_writer(), stream, "Somewhere else.").reason)
    assert "match" in str(store_answer(engine.corpus.entry_writer(), stream, ANSWER.replace("old", "new")).reason)
    assert "match" in str(
        store_answer(engine.corpus.entry_writer(), stream, ANSWER + " It has no roof any more.").reason
    )
    begun = ANSWER[: ANSWER.index(" old") + 2]
    assert store_answer(engine.corpus.entry_writer(), stream, begun).reason is None
    chunk, ids = stored(engine, begun), engine.prompts.chunk_ids(begun)
    assert chunk is not None
    values = references.alone_at(engine.lm, ids, 0, before=old.ids)[-1][1]
    assert error(chunk.layer(engine.lm.n_layers - 1)[1], values[0]) <= TOLERANCE


def test_an_answer_that_was_cut_off_is_stored_with_its_last_token_computed(engine: FusionEngine) -> None:
    old = engine.prompt(QUESTION, PASSAGES)
    stream = answer_of(engine, old, ANSWER)
    assert stream.generation is not None
    ids = stream.generation.ids[:-1]
    short = engine.lm.tokenizer.decode(ids[:6])
    prefilled, tokens = engine.prefill(old, method=make_method("full"), answer_tokens=6), iter(ids)
    sampler: Any = lambda *_: next(tokens)  # noqa: E731
    cut = TextStream(engine.runner, prefilled, SamplingParams(6), sampler=sampler)
    kept = store_answer(engine.corpus.entry_writer(), cut)
    assert cut.result().finish_reason == "length"
    assert kept.computed == len(engine.prompts.chunk_ids(short)) - 5
    assert stored(engine, short) is not None


def test_a_stored_answer_is_placed_but_never_exact(relayed: tuple[FusionEngine, Prompt, Prompt]) -> None:
    engine, _, prompt = relayed
    report = engine.prefill(prompt, method=make_method("relaycaching", ratio=0.0)).report
    assert [lookup.note for lookup in chunk_lookups(report)] == [None, "as generated", None]
    first = engine.prompt(OTHER, [ANSWER])
    report = engine.prefill(first, method=make_method("relaycaching", ratio=1.0)).report
    assert len(report.selected) == len(first.chunks[0]), "directly behind the system prefix too"
    engine.warm([ANSWER], bases=(FRAMED,))
    report = engine.prefill(first, method=make_method("relaycaching", ratio=1.0)).report
    assert report.selected == (), "the exact cache is preferred"


def test_as_published_middle_layers_recompute_tokens_that_deviate_or_that_the_end_attends_to(
    relayed: tuple[FusionEngine, Prompt, Prompt],
) -> None:
    engine, old, prompt = relayed
    lm, layers = engine.lm, RelayLayers(1, 2, 2)
    done = engine.prefill(prompt, method=make_method("relaycaching", layers=layers))
    table = table_of(engine, old, prompt)
    scores = chosen_by_hand(lm, prompt, table, layers)
    chosen = [p for p, score in scores.items() if score >= 1]
    assert list(done.report.selected) == chosen
    assert 0 < len(chosen) < len(scores)

    exact = list(range(prompt.chunks[0].stop))
    everything = [exact + list(scores), exact, exact, exact + list(scores)]
    expected = references.whole_forward(lm, prompt.ids, table, everything)
    references.assert_prefilled(done, expected.logits, expected.table)
    question = len(prompt) - prompt.chunks[-1].stop
    assert done.report.row_layers == 4 * question + 3 * len(scores)


def test_only_chosen_tokens_are_computed_after_detection(relayed: tuple[FusionEngine, Prompt, Prompt]) -> None:
    engine, old, prompt = relayed
    layers = RelayLayers(0, 1, 2)
    done = engine.prefill(prompt, method=make_method("relaycaching", layers=layers))
    table = table_of(engine, old, prompt)
    scores = chosen_by_hand(engine.lm, prompt, table, layers)
    others = [p for p, score in scores.items() if score < 1]
    exact = list(range(prompt.chunks[0].stop))
    kept = [exact, exact, exact + others, exact + list(scores)]
    expected = references.whole_forward(engine.lm, prompt.ids, table, kept)
    assert set(done.report.selected) == set(scores) - set(others)
    assert error(done.logits, expected.logits) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.8])
def test_a_ratio_recomputes_the_highest_scores_to_the_last_layer(
    relayed: tuple[FusionEngine, Prompt, Prompt], ratio: float
) -> None:
    engine, old, prompt = relayed
    done = engine.prefill(prompt, method=make_method("relaycaching", ratio=ratio))
    table, layers = table_of(engine, old, prompt), RelayLayers(0, 2, 3)
    scores = chosen_by_hand(engine.lm, prompt, table, layers)
    chosen = sorted(sorted(scores, key=lambda p: -scores[p])[: int(ratio * len(scores))])
    assert list(done.report.selected) == chosen
    exact = list(range(prompt.chunks[0].stop))
    left = exact + [p for p in scores if p not in chosen]
    expected = references.whole_forward(engine.lm, prompt.ids, table, [exact, exact, exact, left])
    assert error(done.logits, expected.logits) <= TOLERANCE


def test_layers_by_depth_are_the_middle_half() -> None:
    assert RelayLayers.by_depth(32) == RelayLayers(8, 9, 24)
    for n_layers in range(1, 8):
        assert RelayLayers.by_depth(n_layers).end < n_layers
    with pytest.raises(ValueError, match="start <= detect <= end, got 2, 1, 3"):
        RelayLayers(2, 1, 3)


def test_published_thresholds(relayed: tuple[FusionEngine, Prompt, Prompt]) -> None:
    method = make_method("relaycaching")
    assert method.layer_hook == RelayRecompute(None, deviation=1.5, influence=1.45, suffix=10)
    assert (method.base, method.ratio) == (FRAMED, None)
    engine, _, prompt = relayed
    with pytest.raises(ValueError, match="the model has 4 layers, the method asks for layer 9"):
        engine.prefill(prompt, method=make_method("relaycaching", layers=RelayLayers(1, 2, 9)))
