"""Recompute: run the rows of a prompt over what is placed, in one pass or in parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qcfuse_rag.fuse.assembly import Assembly, Placed
from qcfuse_rag.fuse.layerwise import SteeredPass, Steering
from qcfuse_rag.fuse.rows import RowsPlan
from qcfuse_rag.fuse.select import Selection


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
    assembly: Assembly,
    candidates: list[Placed],
    selection: Selection,
    steering: Steering | None,
    context: Literal["all", "selected"],
    pause: Pause | None,
) -> tuple[Tensor, Tensor]:
    """Compute the rows; return the first token's logits and the reused positions that were recomputed.

    Of a pass that lets go of rows on its way, those are the ones it kept to the last layer, unless its steering says
    which count; sets known to be nested beforehand count whole.
    """
    selected = selection.positions
    unknown = (~assembly.known).nonzero()[:, 0]  # the prompt's last position among them
    rows = unknown.to(assembly.lm.device, non_blocking=True)
    if context == "selected" and len(selected):
        _recompute_apart(assembly, candidates, selected, steering)
        steering = None
    elif len(selected):
        # How many there are is known: the host need not wait to see which.
        rows = torch.cat([rows, selected]).sort().values
    gapless = len(rows) == len(unknown) == len(assembly.prompt) - int(unknown[0])
    if pause is not None and steering is None:
        rows = _in_parts(assembly, rows, pause)
    plan = RowsPlan(rows, len(assembly.prompt), windows=assembly.lm.sliding, gapless=gapless)
    course = None if steering is None else SteeredPass(plan, steering, assembly.buffer)
    buffer = assembly.arriving if course is None else assembly.buffer
    logits = assembly.passes.forward_rows(assembly.ids[rows], plan, buffer, course)
    assembly.row_layers += _paid(assembly, rows, course)
    if course is not None and selection.until is None:
        selected = selected[torch.isin(selected, course.chosen)]
    return logits, selected


def _in_parts(assembly: Assembly, rows: Tensor, pause: Pause) -> Tensor:
    """Compute all rows but the last part of them, pausing after each; return the rest.

    A row sees none behind it, so parts one after the other give what one pass gives.
    """
    lm = assembly.lm
    while len(rows) > pause.rows:
        part, rows = rows[: pause.rows], rows[pause.rows :]
        plan = RowsPlan.of(part, lm.sliding)
        assembly.passes.forward_hidden(assembly.ids[part], plan, assembly.arriving, depth=lm.n_layers)
        assembly.row_layers += len(part) * lm.n_layers
        pause.call()
    return rows


def _recompute_apart(assembly: Assembly, candidates: list[Placed], selected: Tensor, steering: Steering | None) -> None:
    """Compute the selected tokens, and what the store lacks in front of them, seeing no reused token but themselves.

    What is exact, and what is no passage, is seen as ever.
    """
    lm, chosen = assembly.lm, selected.cpu()
    length = int(chosen[-1]) + 1
    seen, is_row = torch.ones(length, dtype=torch.bool), ~assembly.known[:length]
    for placed in candidates:
        seen[placed.span.start : placed.span.stop] = False
    seen[chosen], is_row[chosen] = True, True
    visible, rows = (one.nonzero()[:, 0].to(lm.device, non_blocking=True) for one in (seen, is_row))
    plan = RowsPlan(rows, length, visible=[visible] * lm.n_layers, windows=lm.sliding)
    course = None if steering is None else SteeredPass(plan, steering, assembly.buffer)
    assembly.passes.forward_hidden(assembly.ids[rows], plan, assembly.buffer, depth=lm.n_layers, course=course)
    assembly.row_layers += _paid(assembly, rows, course)


def _paid(assembly: Assembly, rows: Tensor, course: SteeredPass | None) -> int:
    return len(rows) * assembly.lm.n_layers if course is None else course.row_layers
