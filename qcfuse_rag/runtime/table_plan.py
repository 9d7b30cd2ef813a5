"""The plan of rows whose buffers a table locates: what kernels compute and CUDA graphs record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import Cache

from qcfuse_rag.runtime.kv_table import KVTable
from qcfuse_rag.runtime.rows import Observer, PlannedLayer


@dataclass(frozen=True, slots=True, eq=False)
class TablePlan:
    """The same number of rows of each of several requests.

    Only tensors on the device identify the requests, so a recorded pass can be replayed for others.

    Attributes:
        rows: `[B, R]` int64 positions, on the model's device; a row sees the keys up to its own position.
        table: locates the buffers.
        windows: per layer the sliding window in tokens or None, for models that do not pass it to attention.
        observe: called in every layer before attention, with the layer's queries and the keys of the rows.
    """

    rows: Tensor
    table: KVTable
    windows: Sequence[int | None]
    observe: Observer | None = None

    def cache(self) -> Cache:
        """Return a transformers cache that writes the rows to the buffers, for one pass."""
        return Cache(layers=[TableLayer(self, layer) for layer in range(len(self.table.shapes))])


class TableLayer(PlannedLayer):
    """A cache layer that writes fresh keys and values to the table's buffers, where attention reads them."""

    def __init__(self, plan: TablePlan, layer: int) -> None:
        super().__init__(plan.table.longest, plan.table.longest)
        self.plan, self.layer = plan, layer

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write `[B, Hkv, R, D]` fresh keys and values to the buffers; return them unchanged."""
        from qcfuse_rag.runtime.kernels.table_attention import append_rows

        append_rows(keys, values, self.plan.table, self.layer, self.plan.rows)
        return keys, values
