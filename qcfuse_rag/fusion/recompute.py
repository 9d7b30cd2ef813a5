"""Recompute: run the rows of a prompt over what is placed, in one pass or in parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qcfuse_rag.fusion.selectors import Selection
from qcfuse_rag.fusion.state import FusedPrompt, PlacedChunk
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.layer_hooks import HookedPass, LayerHook
from qcfuse_rag.runtime.rows import RowsPlan


@dataclass(frozen=True, slots=True)
class Pause:
    """Lets others compute in the midst of a prefill.

    Attributes:
        rows: how many to compute before each pause.
        call: what is called then, in the thread that computes.
    """

    rows: int
    call: Callable[[], None]


def recompute(
    assembly: FusedPrompt,
    candidates: list[PlacedChunk],
    selection: Selection,
    steering: LayerHook | None,
    context: Literal["all", "selected"],
    pause: Pause | None,
) -> tuple[Tensor, Tensor]:
    """Compute the rows; return the first token's logits and the reused positions that were recomputed.

    Of a pass that lets go of rows on its way, those are the ones it kept to the last layer, unless its steering says
    which count; sets known to be nested beforehand count whole.
    """
    lm, selected = assembly.lm, selection.positions
    unknown = (~assembly.known).nonzero()[:, 0]  # the prompt's last position among them
    plan = RowsPlan.of(unknown, lm.sliding, device=lm.device)
    if context == "selected" and len(selected):
        _recompute_apart(assembly, candidates, selected, steering)
        steering = None
    elif len(selected):
        # How many there are is known: the host need not wait to see which.
        plan = RowsPlan(torch.cat([plan.rows, selected]).sort().values, plan.length, windows=lm.sliding)
    if pause is not None and steering is None:
        plan = _in_parts(assembly, plan, pause)
    course = None if steering is None else HookedPass(plan, steering, assembly.buffer)
    buffer = assembly.arriving if course is None else assembly.buffer
    logits = assembly.passes.forward_rows(assembly.ids[plan.rows], plan, buffer, course)
    assembly.row_layers += _paid(lm, plan, course)
    if course is not None and selection.until is None:
        selected = selected[torch.isin(selected, course.chosen)]
    return logits, selected


def _in_parts(assembly: FusedPrompt, plan: RowsPlan, pause: Pause) -> RowsPlan:
    """Compute all rows but the last part of them, pausing after each; return the plan of the rest.

    A row sees none behind it, so parts one after the other give what one pass gives.
    """
    lm, rows = assembly.lm, plan.rows if plan.on_host is None else plan.on_host
    while len(rows) > pause.rows:
        part, rows = RowsPlan.of(rows[: pause.rows], lm.sliding, device=lm.device), rows[pause.rows :]
        assembly.passes.forward_hidden(assembly.ids[part.rows], part, assembly.arriving, depth=lm.n_layers)
        assembly.row_layers += _paid(lm, part, None)
        pause.call()
    return plan if len(rows) == len(plan.rows) else RowsPlan.of(rows, lm.sliding, device=lm.device)


def _recompute_apart(
    assembly: FusedPrompt, candidates: list[PlacedChunk], selected: Tensor, steering: LayerHook | None
) -> None:
    """Compute the selected tokens, and what the store lacks in front of them, seeing no reused token but themselves.

    What is exact, and what is no passage, is seen as ever.
    """
    lm, chosen = assembly.lm, selected.cpu()
    length = int(chosen[-1]) + 1
    seen, is_row = torch.ones(length, dtype=torch.bool), ~assembly.known[:length]
    for placed in candidates:
        seen[placed.span.start : placed.span.stop] = False
    seen[chosen], is_row[chosen] = True, True
    visible = [seen.nonzero()[:, 0]] * lm.n_layers
    plan = RowsPlan.of(is_row.nonzero()[:, 0], lm.sliding, device=lm.device, visible=visible)
    course = None if steering is None else HookedPass(plan, steering, assembly.buffer)
    assembly.passes.forward_hidden(assembly.ids[plan.rows], plan, assembly.buffer, depth=lm.n_layers, course=course)
    assembly.row_layers += _paid(lm, plan, course)


def _paid(lm: LanguageModel, plan: RowsPlan, course: HookedPass | None) -> int:
    return len(plan.rows) * lm.n_layers if course is None else course.row_layers
