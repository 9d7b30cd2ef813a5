"""Rows in recurrent layers: where a pass begins, what its rows see, and when a state is used again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, make_method
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.ingestion.prefill import prefill_chunk
from qcfuse_rag.methods.common import DeviationProbe
from qcfuse_rag.runtime.attention.scores import Scores
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_logits, forward_rows, forward_step
from qcfuse_rag.runtime.recurrent_rows import RecurrentRows
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.store.key import FRAMED
from qcfuse_rag.store.quantization import STORE_FORMATS
from tests.support.engines import make_warmed_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES, QUESTION
from tests.support.references import error, plain_forward

IDS = torch.arange(5, 45)
TOLERANCE = 2e-4


@pytest.fixture(params=["qwen3.5-gated-delta", "granite-mamba-2", "lfm2-convolution", "jamba-mamba"], scope="module")
def lm(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    return LanguageModel.wrap(build_model(request.param), tokenizer)


def between(lm: LanguageModel, start: int, stop: int) -> RowsPlan:
    return RowsPlan.between(start, stop, lm.device, lm.sliding)


def computed(lm: LanguageModel, ids: Tensor = IDS) -> KVBuffer:
    """Return a buffer with all tokens computed, and room for more."""
    buffer = lm.empty_buffer(len(ids) + 8)
    forward_rows(lm, ids, between(lm, 0, len(ids)), buffer)
    return buffer


def expected(lm: LanguageModel, ids: Tensor) -> Tensor:
    return plain_forward(lm, tuple(ids.tolist()))[0]


def positions(buffer: KVBuffer) -> set[int]:
    """Return the positions up to which there are states."""
    return {position for position, _ in buffer.states.values()}


def test_a_pass_leaves_the_state_behind_its_last_row(lm: LanguageModel) -> None:
    buffer = computed(lm)
    assert buffer.states.keys() == lm.recurrent.keys()
    assert positions(buffer) == {len(IDS)}


def test_the_next_pass_begins_with_the_state(lm: LanguageModel) -> None:
    """Stored inputs before it are not read again: here they are gone."""
    if not lm.recurrent[0].continues:
        pytest.skip("its mixers compute one token behind a state, and several from the beginning")
    more = torch.arange(60, 66)
    buffer = computed(lm)
    for layer in lm.recurrent:
        buffer.keys[layer][:, :, : len(IDS)] = torch.nan
        buffer.values[layer][:, :, : len(IDS)] = torch.nan
    logits = forward_logits(lm, more, between(lm, len(IDS), len(IDS) + 6), buffer)
    assert error(logits, expected(lm, torch.cat([IDS, more]))[-6:]) <= TOLERANCE


def test_tokens_between_state_and_rows_are_caught_up_with(lm: LanguageModel) -> None:
    buffer = computed(lm)
    early = computed(lm, IDS[:20])
    buffer.states.clear()
    buffer.states.update(early.states)
    logits = forward_rows(lm, IDS[-3:], between(lm, len(IDS) - 3, len(IDS)), buffer)
    assert error(logits, expected(lm, IDS)[-1]) <= TOLERANCE


@pytest.mark.parametrize("first", [0, 1, 17, 39])
def test_a_state_behind_the_first_row_is_not_used(lm: LanguageModel, first: int) -> None:
    """Other tokens there change every later one, whatever the state was."""
    buffer, changed = computed(lm), IDS.clone()
    changed[first] = 77
    logits = forward_rows(lm, changed[first:], between(lm, first, len(IDS)), buffer)
    assert error(logits, expected(lm, changed)[-1]) <= TOLERANCE
    assert error(logits, expected(lm, IDS)[-1]) > 100 * TOLERANCE


def test_rows_with_gaps_change_what_later_rows_read(lm: LanguageModel) -> None:
    """Rows of other tokens, one at a time and in one pass, leave the same inputs and logits."""
    rows, changed = torch.tensor([3, 17, 18, 39]), IDS.clone()
    changed[rows[:3]] = torch.tensor([77, 78, 79])
    together, alone = computed(lm), computed(lm)
    logits = forward_rows(lm, changed[rows], RowsPlan.of(rows, lm.sliding), together)
    for row in rows.tolist():
        last = forward_rows(lm, changed[row : row + 1], between(lm, row, row + 1), alone)
    assert error(logits, last) <= TOLERANCE
    for layer in range(lm.n_layers):
        for ours, theirs in zip((together.keys, together.values), (alone.keys, alone.values), strict=True):
            assert error(ours[layer][:, :, : len(IDS)], theirs[layer][:, :, : len(IDS)]) <= TOLERANCE


def test_rows_see_visible_positions_alone_and_leave_no_state(lm: LanguageModel) -> None:
    """Other positions are not read, because nothing may have been placed there yet."""
    visible, rows = torch.cat([torch.arange(10), torch.arange(25, 40)]), torch.arange(37, 40)
    buffer = computed(lm)
    for keys, values in zip(buffer.keys, buffer.values, strict=True):
        keys[:, :, 10:25], values[:, :, 10:25] = torch.nan, torch.nan
    plan = RowsPlan.of(rows, lm.sliding, visible=[visible] * lm.n_layers)
    logits = forward_rows(lm, IDS[rows], plan, buffer)
    assert torch.isfinite(logits).all()
    assert buffer.states == {}
    fewer = lm.empty_buffer(40)
    for side, others in ((buffer.keys, fewer.keys), (buffer.values, fewer.values)):
        for layer in range(lm.n_layers):
            others[layer][:, :, visible] = side[layer][:, :, visible]
            others[layer][:, :, 10:25] = 0
    again = forward_rows(lm, IDS[rows], RowsPlan.of(rows, lm.sliding, visible=[visible] * lm.n_layers), fewer)
    assert error(logits, again) <= TOLERANCE


def test_steps_of_several_requests_are_those_of_each_alone(lm: LanguageModel) -> None:
    texts = [IDS, IDS[:13] + 1, IDS[5:30]]
    buffers = [computed(lm, text) for text in texts]
    buffers[1].states.clear()  # as after a pass that another request's beginning was copied for
    grown = [[*text.tolist()] for text in texts]
    for token in (50, 51, 52):
        logits = forward_step(lm, [token] * 3, [len(ids) for ids in grown], buffers)
        for ids, row in zip(grown, logits, strict=True):
            ids.append(token)
            assert error(row, expected(lm, torch.tensor(ids))[-1]) <= TOLERANCE


def test_a_step_of_several_requests_runs_each_mixer_once(lm: LanguageModel) -> None:
    buffers, batches = [computed(lm, text) for text in (IDS, IDS[:13], IDS[5:30])], list[int]()
    mixers = [module.recurrence for module in lm.fused_model.modules() if isinstance(module, RecurrentRows)]
    hooks = [mixer.register_forward_hook(lambda _, args, output: batches.append(len(args[0]))) for mixer in mixers]
    forward_step(lm, [50] * 3, [40, 13, 25], buffers)
    for hook in hooks:
        hook.remove()
    assert batches == [3] * len(lm.recurrent)


def test_requests_of_a_step_that_failed_go_on(lm: LanguageModel) -> None:
    texts = [[*IDS.tolist()], [*IDS[:13].tolist()]]
    buffers = [computed(lm, torch.tensor(text)) for text in texts]
    *_, last = [module for module in lm.fused_model.modules() if isinstance(module, RecurrentRows)]

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    hook = last.recurrence.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        forward_step(lm, [50, 50], [40, 13], buffers)
    hook.remove()
    for text, buffer in zip(texts, buffers, strict=True):
        logits = forward_step(lm, [50], [len(text)], [buffer])
        assert error(logits[0], expected(lm, torch.tensor([*text, 50]))[-1]) <= TOLERANCE


def test_a_request_goes_on_alone_after_steps_with_others(lm: LanguageModel) -> None:
    texts = [[*IDS.tolist()], [*IDS[:13].tolist()]]
    buffers = [computed(lm, torch.tensor(text)) for text in texts]
    for batch in ((0, 1), (0,), (0,), (1,), (0, 1)):
        logits = forward_step(lm, [50] * len(batch), [len(texts[i]) for i in batch], [buffers[i] for i in batch])
        for index, row in zip(batch, logits, strict=True):
            texts[index].append(50)
            assert error(row, expected(lm, torch.tensor(texts[index]))[-1]) <= TOLERANCE


@pytest.fixture
def engine(lm: LanguageModel) -> FusionEngine:
    return make_warmed_engine(lm, bases=(FRAMED,))


class Watched:
    """A probe that computes passages and puts them back; it notes the states that it leaves."""

    def __init__(self) -> None:
        self.left: list[dict[int, object]] = []

    def scores(self, fused: FusedPrompt) -> Scores:
        scores = DeviationProbe(3, "value").scores(fused)
        self.left.append({**fused.buffer.states})
        return scores


def test_rows_that_a_probe_puts_back_leave_no_state(engine: FusionEngine) -> None:
    probe = Watched()
    compared = replace(make_method("cacheblend", variant="release", ratio=0.2, base=FRAMED), probe=probe)
    engine.prefill(engine.prompt(QUESTION, PASSAGES), method=compared)
    assert probe.left == [{}]


@pytest.mark.parametrize("kv_dtype", STORE_FORMATS)
def test_stores_of_every_format_keep_inputs(lm: LanguageModel, kv_dtype: str) -> None:
    engine = make_warmed_engine(lm, MemoryStore(kv_dtype=kv_dtype), bases=(FRAMED,))
    prompt = engine.prompt(QUESTION, PASSAGES)
    kept = engine.prefill(prompt, method=make_method("reuse", base=FRAMED))
    assert kept.report.reused_tokens > kept.report.rows
    lossless = make_warmed_engine(lm, bases=(FRAMED,)).prefill(prompt, method=make_method("reuse", base=FRAMED))
    difference = float((kept.logits - lossless.logits).norm() / lossless.logits.norm())
    assert difference <= (0 if kv_dtype == "model" else 0.3)


def test_a_chunk_has_the_bytes_that_are_announced(lm: LanguageModel) -> None:
    chunk = prefill_chunk(lm, tuple(IDS.tolist()))
    kept = sum(block.nbytes for layer in range(lm.n_layers) for block in chunk.layer(layer))
    assert kept == len(IDS) * lm.kv_bytes_per_token
