"""What fusion must be, for every model family: exact at both ends, and right in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, Method, Prompt, make_method
from qcfuse_rag.generation.sampling_params import SamplingParams
from qcfuse_rag.ingestion.prefill import PrefillTarget, prefill_chunk, prefill_chunks
from qcfuse_rag.ingestion.warm_job import WarmJob
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.store.key import BLIND, FRAMED, Base
from qcfuse_rag.verification.exactness import check_exact, naive_concatenation, stock_attention
from tests.support import references
from tests.support.engines import make_engine, make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION
from tests.support.references import error

TOLERANCE = 1e-4


@pytest.fixture(scope="module", autouse=True)
def poison() -> Iterator[None]:
    """Fill new buffers with NaN, so that reading a position that nobody wrote cannot go unnoticed."""
    allocate = KVBuffer.allocate.__func__  # type: ignore[attr-defined]

    def poisoned(cls: type[KVBuffer], *args: object, **kwargs: object) -> KVBuffer:
        buffer: KVBuffer = allocate(cls, *args, **kwargs)
        for tensor in (*buffer.keys, *buffer.values):
            tensor.fill_(float("nan"))
        return buffer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVBuffer, "allocate", classmethod(poisoned))
        yield


@pytest.fixture(scope="module")
def warmed(family: LanguageModel) -> FusionEngine:
    """Return an engine with stored passages, for tests that only read them."""
    return make_warmed_engine(family, bases=(BLIND, FRAMED))


@pytest.fixture(scope="module")
def prompt(warmed: FusionEngine) -> Prompt:
    return warmed.prompt(QUESTION, PASSAGES)


def test_all_rows_equal_the_models_own_forward(warmed: FusionEngine, prompt: Prompt) -> None:
    logits, table = references.plain_forward(warmed.lm, prompt.ids)
    done = warmed.prefill(prompt, method=make_method("full"))
    references.assert_prefilled(done, logits[-1], table)


def test_greedy_continuation_is_the_models_own(warmed: FusionEngine, prompt: Prompt) -> None:
    expected = references.greedy_continuation(warmed.lm, prompt.ids, 32)
    answer = warmed.generate(prompt, SamplingParams(max_new_tokens=32), method=make_method("full"))
    ended = answer.finish_reason == "end"
    assert list(answer.ids) == expected[: len(answer.ids)]
    assert ended or len(answer.ids) == 32


def test_question_rows_equal_naive_concatenation(warmed: FusionEngine, prompt: Prompt) -> None:
    pieces = [torch.tensor(span.segment.ids) for span in prompt.spans if span.stop <= prompt.chunks[-1].stop]
    asked = torch.tensor(prompt.ids[prompt.chunks[-1].stop :])
    with torch.inference_mode(), stock_attention(warmed.lm):
        naive = naive_concatenation(warmed.lm, [*pieces, asked])[-1]
        full = warmed.lm.model(torch.tensor([prompt.ids])).logits[0, -1]
    done = warmed.prefill(prompt, method=make_method("reuse", base=BLIND))
    assert done.report.rows == len(asked)
    assert error(done.logits, naive) <= TOLERANCE
    assert error(full, naive) > 100 * TOLERANCE, "reuse must matter here, or this test could not fail"


@pytest.mark.parametrize(("method", "base"), [("random", BLIND), ("qcfuse", FRAMED)], ids=["random", "qcfuse"])
def test_selected_rows_equal_one_token_at_a_time(warmed: FusionEngine, prompt: Prompt, method: str, base: Base) -> None:
    done = warmed.prefill(prompt, method=make_method(method, ratio=0.15, base=base))
    table = references.stored_table(warmed.lm, prompt, base)
    rows = [*done.report.selected, *range(prompt.chunks[-1].stop, len(prompt))]
    assert 0 < len(done.report.selected) < done.report.context_tokens
    logits, completed = references.sequential_fusion(warmed.lm, prompt.ids, rows, table)
    references.assert_prefilled(done, logits, completed)


def test_a_framed_chunk_right_after_the_system_prefix_is_exact(warmed: FusionEngine) -> None:
    prompt = warmed.prompt(QUESTION, PASSAGES[:1])
    logits, _ = references.plain_forward(warmed.lm, prompt.ids)
    done = warmed.prefill(prompt, method=make_method("reuse", base=FRAMED))
    assert error(done.logits, logits[-1]) <= TOLERANCE
    chosen = warmed.prefill(prompt, method=make_method("qcfuse", ratio=0.5, base=FRAMED))
    assert chosen.report.selected == (), "nothing exact is recomputed"


@pytest.mark.parametrize("method", [make_method("full"), make_method("random", ratio=0.5)], ids=lambda m: m.name)
def test_changing_a_token_leaves_every_earlier_row_unchanged(
    family: LanguageModel, prompt: Prompt, method: Method
) -> None:
    """The mask bug of sparse prefill: rows that see later tokens."""
    engine, last = make_warmed_engine(family, bases=(BLIND, FRAMED)), prompt.chunks[-1]
    at = last.start + len(last) // 2
    other_ids = list(last.segment.ids)
    other_ids[at - last.start] = (other_ids[at - last.start] + 1) % 300 + 3
    other_chunk = replace(last.segment, ids=tuple(other_ids))
    WarmJob(PrefillTarget(engine.lm, engine.store, prompt.prefix_ids), [other_chunk.ids], bases=(FRAMED,)).run()
    changed = replace(prompt, segments=tuple(other_chunk if s is last.segment else s for s in prompt.segments))
    before, other = (engine.prefill(p, method=method) for p in (prompt, changed))
    assert before.report.selected == other.report.selected
    for layer in range(engine.lm.n_layers):
        assert error(before.buffer.keys[layer][:, :, :at], other.buffer.keys[layer][:, :, :at]) <= 1e-5
        assert error(before.buffer.values[layer][:, :, :at], other.buffer.values[layer][:, :, :at]) <= 1e-5
    assert error(before.logits, other.logits) > TOLERANCE


def test_the_engines_own_check_passes(family: LanguageModel) -> None:
    check = check_exact(family)
    assert check.all_rows < 1e-4
    assert check.question_rows < 1e-4


@pytest.mark.parametrize("framed", [False, True], ids=["blind", "framed"])
def test_chunks_prefilled_together_are_those_prefilled_alone(family: LanguageModel, framed: bool) -> None:
    """Whatever their lengths: places filled up are seen by nobody, and rankings are the chunk's own."""
    engine = make_engine(family, MemoryStore())
    batch = [engine.prompts.chunk_ids(text) for text in (PASSAGES[0], PASSAGES[1] * 2, "Short.", PASSAGES[2])]
    prefix = prefill_chunk(family, engine.prompts.prefix_ids) if framed else None
    for ids, together in zip(batch, prefill_chunks(family, batch, prefix=prefix), strict=True):
        alone = prefill_chunk(family, ids, prefix=prefix)
        assert together.n_tokens == len(ids)
        for layer in range(family.n_layers):
            for ours, theirs in zip(together.layer(layer), alone.layer(layer), strict=True):
                assert error(ours, theirs) <= TOLERANCE
            few = max(1, len(ids) // 4)
            agree = set(together.anchors(0.25)[layer].tolist()) & set(alone.anchors(0.25)[layer].tolist())
            assert len(agree) >= few - 1, "ties apart, the same tokens matter"
