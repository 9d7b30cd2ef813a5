"""One decode step of several requests together: weights are read once for all, keys and values are each request's own.

A step reads the weights whatever the number of its requests, which is most of what one alone takes. Requests differ in
length and stay in their own buffers: nothing is copied or padded when one comes or goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from qcfuse_rag.fuse.buffer import KVBuffer
from qcfuse_rag.fuse.kernels.support import kernels_run_on, widest_head
from qcfuse_rag.fuse.step_table import StepTable

if TYPE_CHECKING:
    from qcfuse_rag.model.language_model import LanguageModel


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The rows of a step: the next token of each request.

    Attributes:
        buffers: of each request, with keys and values at every position before its row; none if the table says all.
        rows: `[B]` int64 positions, on the model's device.
        positions: the same on the host, or more than they will be.
        windows: per layer the sliding window in tokens or None, for models that do not say it themselves.
        table: where the buffers are, for kernels; None if torch computes the step.
    """

    buffers: Sequence[KVBuffer]
    rows: Tensor
    positions: tuple[int, ...]
    windows: Sequence[int | None]
    table: StepTable | None = None


class StepLayer(CacheLayerMixin):  # type: ignore[misc]
    """Writes each request's fresh key and value into its own buffer; attention reads them there."""

    is_sliding = False

    def __init__(self, plan: StepPlan, layer: int) -> None:
        super().__init__()
        self.plan, self.layer = plan, layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffers exist before the step."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store `[B, Hkv, 1, D]`; return them as they are."""
        if self.plan.table is not None:
            from qcfuse_rag.fuse.kernels.step import append_step

            append_step(key_states, value_states, self.plan.table, self.layer, self.plan.rows)
            return key_states, value_states
        for index, (buffer, position) in enumerate(zip(self.plan.buffers, self.plan.positions, strict=True)):
            buffer.keys[self.layer][0, :, position] = key_states[index, :, 0]
            buffer.values[self.layer][0, :, position] = value_states[index, :, 0]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys the longest request has and where they start."""
        return max(self.plan.positions) + 1, 0

    def get_seq_length(self) -> int:
        """Return the number of keys of the longest request."""
        return max(self.plan.positions) + 1

    def get_max_length(self) -> int:
        """Return the capacity of the largest buffer; of a step without buffers, how long its requests may get."""
        return max((buffer.capacity for buffer in self.plan.buffers), default=self.get_seq_length())


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
    rows = torch.tensor(positions, device=lm.device)
    table: StepTable | None = None
    if kernels_run_on(lm.device, lm.dtype, widest_head(lm)):
        table = StepTable.of(buffers, lm.shapes, max(positions) + 1)
    plan = StepPlan(buffers, rows, tuple(positions), lm.sliding, table)
    return forward_plan(lm, torch.tensor(tokens, device=lm.device), plan)


@torch.inference_mode()
def forward_plan(lm: LanguageModel, tokens: Tensor, plan: StepPlan) -> Tensor:
    """Compute a planned step.

    Args:
        lm: the model.
        tokens: `[B]` int64 on its device, of each request the token to go on from.
        plan: where they stand.

    Returns:
        `[B, vocabulary]` float32 logits.
    """
    logits: Tensor = lm.model(
        input_ids=tokens[:, None],
        position_ids=plan.rows[:, None],
        # A 4-D mask is handed through unread, which keeps transformers from building one of its own.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=lm.device),
        past_key_values=Cache(layers=[StepLayer(plan, layer) for layer in range(lm.n_layers)]),
        use_cache=True,
        fusion=plan,
    ).logits
    return logits[:, -1].float()
