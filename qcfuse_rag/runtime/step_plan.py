"""The plan of one decode step: the next row of each of several requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from qcfuse_rag.runtime.buffer import KVBuffer

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The rows of a step that torch computes: the next token of each request. See `TablePlan` for kernels.

    Attributes:
        buffers: of each request, with keys and values at every position before its row.
        rows: `[B, 1]` int64 positions, on the model's device.
        positions: the same on the host.
        windows: per layer the sliding window in tokens or None, for models that do not say it themselves.
    """

    buffers: Sequence[KVBuffer]
    rows: Tensor
    positions: tuple[int, ...]
    windows: Sequence[int | None]

    def cache(self) -> Cache:
        """Return a transformers cache through which the step writes into the buffers."""
        return Cache(layers=[StepLayer(self, layer) for layer in range(len(self.buffers[0].keys))])


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
        """Return the capacity of the largest buffer."""
        return max(buffer.capacity for buffer in self.plan.buffers)
