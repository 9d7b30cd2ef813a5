"""The plan of one decode step: the next row of each of several requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import Cache

from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.rows import PlannedLayer


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The rows of a decode step that torch computes: the next token of each request. Kernels use a `TablePlan`.

    Attributes:
        buffers: one for each request, with keys and values at every position before its row.
        rows: `[B, 1]` int64 positions, on the model's device.
        positions: the same positions on the host.
        windows: per layer the sliding window in tokens or None, for models that do not pass it to attention.
    """

    buffers: Sequence[KVBuffer]
    rows: Tensor
    positions: tuple[int, ...]
    windows: Sequence[int | None]

    def cache(self) -> Cache:
        """Return a transformers cache that writes the step's rows to the buffers."""
        return Cache(layers=[StepLayer(self, layer) for layer in range(len(self.buffers[0].keys))])


class StepLayer(PlannedLayer):
    """A cache layer that writes each request's fresh key and value to its own buffer, where attention reads them."""

    def __init__(self, plan: StepPlan, layer: int) -> None:
        super().__init__(max(plan.positions) + 1, max(buffer.capacity for buffer in plan.buffers))
        self.plan, self.layer = plan, layer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write `[B, Hkv, 1, D]` fresh keys and values to the buffers; return them unchanged."""
        for index, (buffer, position) in enumerate(zip(self.plan.buffers, self.plan.positions, strict=True)):
            buffer.keys[self.layer][0, :, position] = key_states[index, :, 0]
            buffer.values[self.layer][0, :, position] = value_states[index, :, 0]
        return key_states, value_states
