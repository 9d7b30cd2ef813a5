"""One decode step of several requests together.

A step reads the model's weights once, however many requests it has; reading them is most of the time of a step. The
requests may differ in length and keep their own buffers: nothing is copied or padded when a request joins or leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.device import to_device
from qcfuse_rag.runtime.forward import planned_inputs
from qcfuse_rag.runtime.kernels.support import kernels_available
from qcfuse_rag.runtime.kv_table import KVTable, TablePlan
from qcfuse_rag.runtime.rows import StepPlan

if TYPE_CHECKING:
    from qcfuse_rag.runtime.language_model import LanguageModel


@torch.inference_mode()
def forward_step(
    lm: LanguageModel, tokens: Sequence[int], positions: Sequence[int], buffers: Sequence[KVBuffer]
) -> Tensor:
    """Compute the next row of each request.

    Args:
        lm: the model.
        tokens: each request's last token.
        positions: the position of that token.
        buffers: each request's keys and values; those of the token are written there.

    Returns:
        `[B, vocabulary]` float32 logits.
    """
    rows = to_device(torch.tensor(positions), lm.device)[:, None]
    plan: StepPlan | TablePlan = StepPlan(buffers, rows, tuple(positions), lm.sliding)
    if kernels_available(lm.device, lm.dtype, lm.widest_head):
        plan = TablePlan(rows, KVTable.of(buffers, lm.shapes, max(positions) + 1), lm.sliding)
    return forward_plan(lm.fused_model, to_device(torch.tensor(tokens), lm.device), plan)


@torch.inference_mode()
def forward_plan(model: nn.Module, tokens: Tensor, plan: StepPlan | TablePlan) -> Tensor:
    """Compute a planned step.

    Args:
        model: the model, or a view of it with the same results.
        tokens: `[B]` int64 on the model's device, each request's last token.
        plan: the rows of the step.

    Returns:
        `[B, vocabulary]` float32 logits.
    """
    logits: Tensor = model(**planned_inputs(tokens[:, None], plan.rows, plan.cache(), plan)).logits
    return logits[:, -1].float()
