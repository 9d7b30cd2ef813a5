"""Rows of requests whose keys and values a table tells the place of: what kernels compute, and CUDA graphs record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from qcfuse_rag.runtime.kv_table import KVTable
from qcfuse_rag.runtime.rows import Observer


@dataclass(frozen=True, slots=True, eq=False)
class TablePlan:
    """As many rows of each of some requests. Nothing in it says which requests: tensors on the device do.

    Attributes:
        rows: `[B, R]` int64 positions, on the model's device; each sees the keys up to itself.
        table: where the buffers are.
        windows: per layer the sliding window in tokens or None, for models that do not say it themselves.
        observe: called in every layer before attention, with the layer's queries and the rows' own keys.
    """

    rows: Tensor
    table: KVTable
    windows: Sequence[int | None]
    observe: Observer | None = None

    def cache(self) -> Cache:
        """Return a transformers cache through which one pass over the rows writes into the buffers."""
        return Cache(layers=[TableLayer(self, layer) for layer in range(len(self.table.shapes))])


class TableLayer(CacheLayerMixin):  # type: ignore[misc]
    """Writes fresh keys and values where the table says; attention reads them there."""

    is_sliding = False

    def __init__(self, plan: TablePlan, layer: int) -> None:
        super().__init__()
        self.plan, self.layer = plan, layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffers exist before the pass."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store `[B, Hkv, R, D]`; return them as they are."""
        from qcfuse_rag.runtime.kernels.paged_attention import append_rows

        append_rows(key_states, value_states, self.plan.table, self.layer, self.plan.rows)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys the longest request may have and where they start."""
        return self.plan.table.longest, 0

    def get_seq_length(self) -> int:
        """Return the number of keys that the longest request may have."""
        return self.plan.table.longest

    def get_max_length(self) -> int:
        """Return the same."""
        return self.plan.table.longest
