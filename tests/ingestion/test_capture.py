"""Captured passages and their statistics equal those of the model's own forward pass."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, Prompt
from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.ingestion.prefill import prefill_chunk
from qcfuse_rag.methods.captures import attention as statistics
from qcfuse_rag.methods.captures.job import capture_chunks
from qcfuse_rag.methods.captures.slots import context_of, fact
from qcfuse_rag.runtime.attention.dispatch import ATTENTION_NAME
from qcfuse_rag.runtime.placement import copy_chunk, rotate_buffer
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import hash_ids
from tests.support import references
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES, QUESTION

TOLERANCE = 1e-4


@pytest.fixture
def prompt(engine: FusionEngine) -> Prompt:
    return engine.prompt(QUESTION, PASSAGES)


def capture(lm: LanguageModel, prompt: Prompt) -> list[ChunkKV]:
    """Capture a prompt's passages, as `Corpus.capture` does."""
    return capture_chunks(lm, prompt.prefix_ids, [span.segment.stored_ids for span in prompt.chunks])


def eager_attention(lm: LanguageModel, ids: tuple[int, ...]) -> Tensor:
    """Return transformers' own attention weights, `[L, T, T]`, mean over heads."""
    lm.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            weights = lm.model(torch.tensor([ids], device=lm.device), output_attentions=True).attentions
    finally:
        lm.model.set_attn_implementation(ATTENTION_NAME)
    return torch.stack([layer[0].mean(0) for layer in weights])


def statistics_by_hand(weights: Tensor, spans: list[range]) -> list[tuple[float, list[float], list[float]]]:
    """Return CCI, attention to each earlier chunk and of each token, for every chunk but the first; token by token."""
    statistics = []
    layers = len(weights)
    for i, span in enumerate(spans[1:], start=1):
        a = b = 0.0
        inter, tokens = [0.0] * i, [0.0] * len(span)
        for layer in range(layers):
            for j in range(i):
                for row in span:
                    paid = float(weights[layer, row, spans[j].start : spans[j].stop].sum())
                    inter[j] += paid / layers
                    tokens[row - span.start] += paid / layers
                    a += paid / (len(span) * len(spans[j])) / layers
            for row in span:
                b += float(weights[layer, row, span.start : row + 1].sum()) / len(span) ** 2 / layers
        statistics.append((1 / (1 + math.exp(-a / b)), inter, tokens))
    return statistics


def test_captured_passages_are_those_of_the_models_own_forward(family: LanguageModel) -> None:
    engine = make_engine(family, MemoryStore())
    prompt = engine.prompt(QUESTION, PASSAGES)
    _, table = references.plain_forward(family, prompt.ids)
    captured = capture(family, prompt)
    assert len(captured) == len(PASSAGES) - 1
    for span, chunk in zip(prompt.chunks[1:], captured, strict=True):
        buffer = family.empty_buffer(len(prompt))
        copy_chunk(buffer, span.start, chunk)
        rotate_buffer(buffer, family.ropes, span.start, span.stop)
        positions = slice(span.start, span.stop)
        for layer, (keys, values) in enumerate(table):
            assert (buffer.keys[layer][:, :, positions] - keys[:, :, positions]).abs().max() <= TOLERANCE
            assert (buffer.values[layer][:, :, positions] - values[:, :, positions]).abs().max() <= TOLERANCE


def test_statistics_are_those_of_the_models_own_attention(family: LanguageModel) -> None:
    if "gpt-oss" in family.name:
        pytest.skip("its attention has learned sinks, which the statistics ignore")
    prompt = make_engine(family, MemoryStore()).prompt(QUESTION, PASSAGES)
    spans = [range(span.start, span.stop) for span in prompt.chunks]
    expected = statistics_by_hand(eager_attention(family, prompt.ids), spans)
    for chunk, (impact, inter, tokens) in zip(capture(family, prompt), expected, strict=True):
        assert fact(chunk, "cci") == pytest.approx((impact,), abs=1e-5)
        assert fact(chunk, "inter") == pytest.approx(inter, rel=1e-3, abs=1e-4)
        assert chunk.blocks["inter"][:, 0].tolist() == pytest.approx(tokens, rel=1e-3, abs=1e-5)
        assert 0.5 <= impact < 1.0


def test_statistics_are_the_same_made_a_few_rows_at_a_time(
    llama: LanguageModel, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = capture(llama, prompt)
    monkeypatch.setattr(statistics, "MAX_SCORE_BYTES", 4 * 4 * len(prompt) * 7)
    for whole, blockwise in zip(at_once, capture(llama, prompt), strict=True):
        assert fact(whole, "inter") == pytest.approx(fact(blockwise, "inter"), rel=1e-5)
        assert fact(whole, "cci") == pytest.approx(fact(blockwise, "cci"), rel=1e-6)
        assert torch.allclose(whole.blocks["inter"], blockwise.blocks["inter"], atol=1e-6)


def test_a_captured_passage_has_its_context(llama: LanguageModel, prompt: Prompt) -> None:
    hashes = [hash_ids(span.segment.ids) for span in prompt.chunks]
    assert [context_of(chunk) for chunk in capture(llama, prompt)] == [(hashes[0],), (hashes[0], hashes[1])]


def test_neither_question_nor_conversation_changes_what_is_captured(engine: FusionEngine, llama: LanguageModel) -> None:
    plain = capture(llama, engine.prompt(QUESTION, PASSAGES))
    talked = engine.prompt("Something else?", PASSAGES, history=[("user", "My name is Ann."), ("assistant", "Hello.")])
    for expected, actual in zip(plain, capture(llama, talked), strict=True):
        for name in expected.names():
            assert torch.equal(expected.blocks[name], actual.blocks[name])


def test_tokens_are_ranked_as_in_a_prefill_behind_the_same_text(llama: LanguageModel, prompt: Prompt) -> None:
    for index, chunk in enumerate(capture(llama, prompt), start=1):
        before = tuple(token for span in prompt.chunks[:index] for token in span.segment.ids)
        prefix = prefill_chunk(llama, (*prompt.prefix_ids, *before))
        alone = prefill_chunk(llama, prompt.chunks[index].segment.ids, prefix=prefix)
        for layer in range(llama.n_layers):
            few = max(1, chunk.n_tokens // 4)
            agree = set(chunk.anchors(0.25)[layer].tolist()) & set(alone.anchors(0.25)[layer].tolist())
            assert len(agree) >= few - 1, "ties apart, the same tokens matter"
            assert sorted(chunk.blocks["ranking"][layer].tolist()) == list(range(chunk.n_tokens))


def test_one_passage_has_no_context_to_capture(engine: FusionEngine, llama: LanguageModel) -> None:
    assert capture(llama, engine.prompt(QUESTION, PASSAGES[:1])) == []
    assert capture(llama, engine.prompt(QUESTION)) == []


def test_passages_beyond_the_window_are_refused_and_up_to_it_are_not(llama: LanguageModel) -> None:
    most = llama.context_window.tokens
    prefix_ids, first = (5,) * 10, (6,) * 100
    [last] = capture_chunks(llama, prefix_ids, [first, (7,) * (most - 110)])
    assert isinstance(last, ChunkKV)
    assert last.n_tokens == most - 110, (
        "without an instruction, for which there is no room, its tokens rank as they are"
    )
    with pytest.raises(PromptTooLong, match="capture fewer passages at once"):
        capture_chunks(llama, prefix_ids, [first, (7,) * (most - 109)])
