"""Recompute: run the rows of a prompt over the placed chunks, in one pass or in parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import TypeVar

import torch
from torch import Tensor

from qcfuse_rag.fusion.selectors import Selection
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.runtime.device import DeviceTimestamp
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.layer_hooks import HookedPass, LayerHook
from qcfuse_rag.runtime.rows import RowsPlan

T = TypeVar("T")

Parts = Generator[int, None, T]
"""Work in parts: yields the number of rows left before each part, and returns the result. Work that fits one part
yields nothing."""

PartRows = Callable[[], int]
"""Returns the most rows of the next part, at least 1."""


def complete(parts: Parts[T]) -> T:
    """Do all parts one after the other; return the result."""
    while True:
        try:
            next(parts)
        except StopIteration as finished:
            result: T = finished.value
            return result


def recompute(
    fused: FusedPrompt,
    selection: Selection,
    hook: LayerHook | None,
    part_rows: PartRows | None,
) -> Parts[tuple[Tensor, Tensor]]:
    """Compute the rows; return the first token's logits and the reused positions that were recomputed.

    If a hook drops rows between layers, the positions are those kept to the last layer; a `ChoosingHook` may name
    them itself.
    """
    lm, selected = fused.lm, selection.positions
    unknown = (~fused.known).nonzero()[:, 0]  # includes the prompt's last position
    plan = RowsPlan.of(unknown, lm.sliding, device=lm.device)
    if len(selected):
        # Their number is known on the host, which need not wait for the positions.
        plan = RowsPlan(torch.cat([plan.rows, selected]).sort().values, plan.length, windows=lm.sliding)
    if part_rows is not None and hook is None:
        plan = yield from _all_but_last_part(fused, plan, part_rows)
    # A layer hook reads stored layers between the layers of the pass, so all of them have to be there first.
    buffer = fused.loading_buffer if hook is None else fused.await_all()
    hooked_pass = None if hook is None else HookedPass(plan, hook, buffer)
    logits = fused.runner.prefills.logits(fused.ids[plan.rows], plan, buffer, hooked_pass)
    fused.row_layers += _row_layers(lm, plan, hooked_pass)
    if hooked_pass is not None:
        selected = selected[torch.isin(selected, hooked_pass.chosen)]
    return logits, selected


def _all_but_last_part(fused: FusedPrompt, plan: RowsPlan, part_rows: PartRows) -> Parts[RowsPlan]:
    """Compute all rows but the last part; return the plan of the last part.

    A row sees no later row, so parts in order give the same result as one pass. The last part may be half as long
    again: an additional short pass would cost more than the longer part delays other requests.
    """
    lm, rows = fused.lm, plan.rows if plan.on_host is None else plan.on_host
    if 2 * len(rows) <= 3 * part_rows():
        return plan
    while 2 * len(rows) > 3 * part_rows():
        yield from _let_others_run(fused, len(rows))
        count = min(part_rows(), len(rows) - 1)
        part, rows = RowsPlan.of(rows[:count], lm.sliding, device=lm.device), rows[count:]
        fused.runner.prefills.hidden(fused.ids[part.rows], part, fused.loading_buffer, depth=lm.n_layers)
        fused.row_layers += _row_layers(lm, part, None)
        DeviceTimestamp.on(lm.device).wait()  # so that a cancelled request has no launched work left
    yield from _let_others_run(fused, len(rows))
    return RowsPlan.of(rows, lm.sliding, device=lm.device)


def _let_others_run(fused: FusedPrompt, rows_left: int) -> Parts[None]:
    """Yield the number of rows left, and note how long other requests ran."""
    began = time.perf_counter()
    yield rows_left
    fused.others_s += time.perf_counter() - began


def _row_layers(lm: LanguageModel, plan: RowsPlan, hooked_pass: HookedPass | None) -> int:
    return len(plan.rows) * lm.n_layers if hooked_pass is None else hooked_pass.row_layers
