"""A request's keys and values, one preallocated pair per layer, and the transformers cache that writes into them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from qcfuse_rag.models.rope import KVShape
from qcfuse_rag.runtime.buffer_pool import BufferPool
from qcfuse_rag.runtime.rows import RowsPlan


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class KVBuffer:
    """Rotated keys and values of a prompt and the answer to come.

    Index in the buffer equals position in the prompt. Memory is not cleared: a position holds nothing until it has
    been placed or computed as a row.

    Attributes:
        keys: per layer `[B, Hkv, capacity, D]`; B is 1 for a request, more for chunks prefilled together.
        values: per layer `[B, Hkv, capacity, Dv]`.
        arrive: called with a layer before a pass writes or reads it, to wait for what is on its way there; None if
            nothing is.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    wait_for_layer: Callable[[int], None] | None = None

    @classmethod
    def allocate(
        cls,
        shapes: tuple[KVShape, ...],
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        batch: int = 1,
        pool: BufferPool | None = None,
    ) -> KVBuffer:
        """Reserve room for `capacity` tokens of each of `batch` sequences, in a pool's memory if it is the host's."""
        sizes = [(batch, shape.kv_heads, capacity, dim) for shape in shapes for dim in (shape.key_dim, shape.value_dim)]
        if pool is None or device.type != "cpu":
            held = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
        else:
            lengths = [math.prod(size) for size in sizes]
            parts = torch.split(pool.take(sum(lengths) * dtype.itemsize).view(dtype), lengths)
            held = [part.view(size) for part, size in zip(parts, sizes, strict=True)]
        return cls(tuple(held[::2]), tuple(held[1::2]))

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return self.keys[0].shape[2]

    def cache(self, plan: RowsPlan) -> Cache:
        """Return a transformers cache through which one pass over the plan's rows writes here."""
        at = plan.at
        return Cache(
            layers=[
                RowsLayer(
                    k, v, at, plan.length, None if self.wait_for_layer is None else partial(self.wait_for_layer, layer)
                )
                for layer, (k, v) in enumerate(zip(self.keys, self.values, strict=True))
            ]
        )


class RowsLayer(CacheLayerMixin):  # type: ignore[misc]
    """Writes a pass's fresh keys and values at their positions and returns everything up to the plan's length."""

    is_sliding = False

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        at: slice | Tensor,
        length: int,
        wait_for_layer: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.wait_for_layer = wait_for_layer
        self.keys, self.values = keys, values
        self.at, self.length = at, length
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffer exists before the pass."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Scatter `[B, Hkv, R, D]` fresh keys and values to their rows; return `[B, Hkv, length, D]` views."""
        assert self.keys is not None
        assert self.values is not None
        if self.wait_for_layer is not None:  # what is stored must be there first: rows take its place
            self.wait_for_layer()
        self.keys[:, :, self.at] = key_states
        self.values[:, :, self.at] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys there are and where they start."""
        return self.length, 0

    def get_seq_length(self) -> int:
        """Return the number of keys before the pass's last row."""
        return self.length

    def get_max_length(self) -> int:
        """Return the buffer's capacity."""
        assert self.keys is not None
        return self.keys.shape[2]
