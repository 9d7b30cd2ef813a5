"""Tokens move with the recomputed tokens of their passage: all that are not recomputed, once, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, make_method
from qcfuse_rag.models.rope import LayerRope, angles, rotate
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.residuals import ResidualKernel, ResidualSpread
from qcfuse_rag.runtime.rows import RowsPlan
from tests.support import references
from tests.support.passages import PASSAGES, QUESTION

KERNEL = ResidualKernel(length=8.0, shared=0.2, noise=2.0)
PASSAGES_AT = ((3, 15), (17, 30), (30, 41))
LENGTH, HEADS, DIM = 48, 2, 8


def test_one_source_moves_tokens_less_the_farther_they_are() -> None:
    weights = KERNEL.weights(torch.tensor([5, 13, 10_005]), torch.tensor([5]))[:, 0]
    near = 0.2 + 0.8 * torch.exp(torch.tensor(-1.0))
    assert torch.allclose(weights, torch.stack([torch.tensor(1.0), near, torch.tensor(0.2)]) / 3)


def test_many_sources_say_more_than_one_and_never_more_than_all_they_share() -> None:
    totals = [float(KERNEL.weights(torch.tensor([50]), torch.arange(n)).sum()) for n in (1, 5, 40)]
    assert totals == sorted(totals)
    assert totals[-1] < 1


@st.composite
def passes(draw: st.DrawFn) -> tuple[Tensor, list[Tensor]]:
    """Return the recomputed tokens of the passages, and the rows of the passes that compute them in order."""
    inside = [position for start, stop in PASSAGES_AT for position in range(start, stop)]
    selected = sorted(draw(st.sets(st.sampled_from(inside), min_size=1)))
    rows = sorted({*selected, *range(41, LENGTH)})
    cuts = sorted(draw(st.sets(st.integers(1, len(rows) - 1), max_size=3)))
    parts = [rows[first:last] for first, last in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    return torch.tensor(selected), [torch.tensor(part) for part in parts]


def spread_of(selected: Tensor, rope: LayerRope | None = None) -> ResidualSpread:
    return ResidualSpread(KERNEL, (rope or LayerRope(None),) * 2, PASSAGES_AT, selected)


@given(passes())
@settings(deadline=None)
def test_in_one_pass_or_several_each_token_of_a_recomputed_passage_moves_once(
    case: tuple[Tensor, list[Tensor]],
) -> None:
    selected, parts = case
    moved = torch.zeros(LENGTH, dtype=torch.int64)
    done = torch.zeros(LENGTH, dtype=torch.bool)
    for rows in parts:
        residuals = spread_of(selected).in_pass(RowsPlan.of(rows))
        for group in residuals.groups if residuals is not None else ():
            assert not bool(done[group.sources].any()), "a residual is known in the pass that computes it"
            moves = (group.weights != 0).any(1).nonzero()[:, 0] + group.first
            moved[moves] += 1
            assert not bool(torch.isin(moves, selected).any()), "what is recomputed stays"
        done[rows] = True
    expected = torch.zeros(LENGTH, dtype=torch.int64)
    for start, stop in PASSAGES_AT:
        if bool(((selected >= start) & (selected < stop)).any()):
            expected[start:stop] = 1
    expected[selected] = 0
    assert torch.equal(moved, expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_written_moves_other_tokens_as_computed_one_by_one(interleaved: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rope = LayerRope(torch.tensor([1.0, 0.3, 0.1]), interleaved)  # two of the eight channels are not rotated
    selected = torch.tensor([4, 9, 10, 33])
    rows = torch.cat([selected, torch.arange(41, LENGTH)])
    sides = [torch.randn(1, HEADS, LENGTH + 5, DIM, generator=generator).to(dtype) for _ in range(4)]
    buffer = KVBuffer((sides[0].clone(), sides[1].clone()), (sides[2].clone(), sides[3].clone()))
    fresh = [torch.randn(1, HEADS, len(rows), DIM, generator=generator).to(dtype) for _ in range(2)]
    cache = KVBuffer(buffer.keys, buffer.values, residuals=spread_of(selected, rope)).cache(RowsPlan.of(rows))
    for layer in cache.layers:
        layer.update(*fresh)

    def turned(vectors: Tensor, position: int) -> Tensor:
        angle = angles(rope.inv_freq, torch.tensor([position]))  # type: ignore[arg-type]
        return rotate(vectors[:, None], *angle, interleaved=interleaved)[:, 0]

    for kind, stored, found in ((0, sides[1], buffer.keys[1]), (1, sides[3], buffer.values[1])):
        expected = stored.float().clone()
        expected[:, :, rows] = fresh[kind].float()
        changed = {int(row): (fresh[kind][0, :, i] - stored[0, :, row]).float() for i, row in enumerate(rows)}
        for start, stop in PASSAGES_AT:
            sources = [int(row) for row in selected if start <= row < stop]
            for position in range(start, stop) if sources else ():
                if position in sources:
                    continue
                weights = KERNEL.weights(torch.tensor([position]), torch.tensor(sources))[0]
                for weight, source in zip(weights, sources, strict=True):
                    residual = changed[source] if kind else turned(turned(changed[source], -source), position)
                    expected[0, :, position] += weight * residual
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        assert torch.allclose(found.float(), expected, atol=tolerance)
        still = [position for position in range(LENGTH) if 17 <= position < 30 or position < 3]
        assert torch.equal(found[:, :, still], stored[:, :, still])
    kept = [position for position in range(41) if position not in selected]
    assert torch.equal(buffer.keys[0][:, :, kept], sides[0][:, :, kept]), "in layer 0 there are no residuals"


def test_a_prefill_moves_only_what_was_reused_and_not_exact(family: LanguageModel) -> None:
    engine = FusionEngine(family, MemoryStore())
    engine.warm(PASSAGES)
    prompt = engine.prompt(QUESTION, PASSAGES)
    still, moving = (make_method("auto", ratio=0.3, guard=False, residuals=on) for on in (False, True))
    before, after = (engine.prefill(prompt, method=method) for method in (still, moving))
    assert after.buffer.residuals is None, "healing and decoding move nothing"
    assert after.report.selected == before.report.selected
    first = prompt.chunks[0]
    exact = slice(0, first.stop)
    for layer in range(family.n_layers):
        assert torch.equal(after.buffer.values[layer][:, :, exact], before.buffer.values[layer][:, :, exact])
    reused = sorted(set(range(first.stop, prompt.chunks[-1].stop)) - set(after.report.selected))
    values = [done.buffer.values[1][0, :, reused] for done in (before, after)]
    moved = {reused[i] for i in (values[0] != values[1]).any(-1).any(0).nonzero()[:, 0].tolist()}
    recomputed_passages = [
        span for span in prompt.chunks if any(span.start <= at < span.stop for at in after.report.selected)
    ]
    assert moved
    assert moved <= {position for span in recomputed_passages for position in range(span.start, span.stop)}
    again = engine.prefill(prompt, method=moving)
    assert torch.equal(again.logits, after.logits), "stored caches are as they were"


def test_with_everything_recomputed_nothing_moves(family: LanguageModel) -> None:
    engine = FusionEngine(family, MemoryStore())
    engine.warm(PASSAGES)
    prompt = engine.prompt(QUESTION, PASSAGES)
    done = engine.prefill(prompt, method=make_method("auto", ratio=1.0, guard=False, residuals=True))
    assert torch.allclose(done.logits, references.plain_forward(family, prompt.ids)[0][-1], atol=1e-4)
