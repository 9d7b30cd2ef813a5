"""One decode step of several requests together: weights are read once for all, keys and values are each request's own.

A step reads the weights whatever the number of its requests, which is most of what one alone takes. Requests differ in
length and stay in their own buffers: nothing is copied or padded when one comes or goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import planned_inputs
from qcfuse_rag.runtime.kernels.support import kernels_run_on
from qcfuse_rag.runtime.kv_table import KVTable
from qcfuse_rag.runtime.step_plan import StepPlan
from qcfuse_rag.runtime.table_plan import TablePlan

if TYPE_CHECKING:
    from qcfuse_rag.runtime.language_model import LanguageModel


@torch.inference_mode()
def forward_step(
    lm: LanguageModel, tokens: Sequence[int], positions: Sequence[int], buffers: Sequence[KVBuffer]
) -> Tensor:
    """Compute the next row of each request.

    Args:
        lm: the model.
        tokens: of each request the token to go on from.
        positions: where it stands.
        buffers: each request's keys and values; the token's own are written there.

    Returns:
        `[B, vocabulary]` float32 logits.
    """
    rows = torch.tensor(positions).to(lm.device, non_blocking=True)[:, None]
    plan: StepPlan | TablePlan = StepPlan(buffers, rows, tuple(positions), lm.sliding)
    if kernels_run_on(lm.device, lm.dtype, lm.widest_head):
        plan = TablePlan(rows, KVTable.of(buffers, lm.shapes, max(positions) + 1), lm.sliding)
    return forward_plan(lm.model, torch.tensor(tokens).to(lm.device, non_blocking=True), plan)


@torch.inference_mode()
def forward_plan(model: nn.Module, tokens: Tensor, plan: StepPlan | TablePlan) -> Tensor:
    """Compute a planned step.

    Args:
        model: or a view of it that computes the same.
        tokens: `[B]` int64 on its device, of each request the token to go on from.
        plan: where they stand.

    Returns:
        `[B, vocabulary]` float32 logits.
    """
    logits: Tensor = model(**planned_inputs(tokens[:, None], plan.rows, plan.cache(), plan)).logits
    return logits[:, -1].float()
