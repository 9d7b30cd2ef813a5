"""The keys and values of one request: preallocated tensors, the pool they come from, and the cache that writes to them.

On a CPU, the first write to fresh memory waits for the system to find each page. That takes as long as copying the
stored caches, so a `BufferPool` hands the memory of finished requests to new ones. On other devices torch's allocator
does so, if it is asked for few different sizes.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache

from qcfuse_rag.models.rope import KVShape
from qcfuse_rag.runtime.residuals import ResidualSpread
from qcfuse_rag.runtime.rows import PlannedLayer, RowsPlan, States, StoredSequence

SPARE_BYTES = 1 << 30
POOL_ALIGNMENT = 64
"""Bytes that pooled memory is aligned to, for vector instructions."""
STEPS_PER_DOUBLING = 8
"""Block sizes between a size and twice that size: requests of nearly the same length share one block size."""
MAX_OVERSIZE = 2
"""A block is at most this many times larger than asked for, so a short request does not occupy a long one's memory."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class KVBuffer:
    """Rotated keys and values of a prompt and its answer.

    The index in the buffer is the position in the prompt. Memory is not cleared: a position is undefined until a chunk
    is placed there or the position is computed as a row.

    Attributes:
        keys: per layer `[B, Hkv, capacity, D]`; B is 1 for a request, more for chunks prefilled together.
        values: per layer `[B, Hkv, capacity, Dv]`.
        wait_for_layer: called with a layer's index before a pass writes or reads the layer; returns when the layer's
            stored chunks are placed. None if nothing is being loaded.
        residuals: adds estimated corrections to the keys and values of passage tokens that are not recomputed; None
            leaves them as they were stored.
        states: of recurrent layers, whose inputs stand in the place of keys and values, see `models.recurrence`. A pass
            leaves the state behind its last row, and begins with it if its own first row comes no earlier.
        latent: the layers that hold rotary keys and latents; see `KVShape`.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    wait_for_layer: Callable[[int], None] | None = None
    residuals: ResidualSpread | None = None
    states: States = field(default_factory=dict)
    latent: frozenset[int] = frozenset()

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
        """Allocate a buffer for `batch` sequences of `capacity` tokens.

        On a CPU it comes from the pool, if there is one. On other devices its memory is of rounded size, so that
        requests of nearly the same length take the same blocks of torch's cache. Each tensor has a block of its own: a
        free block of all layers would be cut for any smaller tensor, and no request could take it then.
        """
        sizes = [(batch, shape.kv_heads, capacity, dim) for shape in shapes for dim in (shape.key_dim, shape.value_dim)]
        if device.type != "cpu":
            tensors = [_empty_in_block(size, dtype, device) for size in sizes]
        elif pool is None:
            tensors = [torch.empty(size, dtype=dtype) for size in sizes]
        else:
            lengths = [math.prod(size) for size in sizes]
            parts = torch.split(pool.allocate(sum(lengths) * dtype.itemsize).view(dtype), lengths)
            tensors = [part.view(size) for part, size in zip(parts, sizes, strict=True)]
        latent = frozenset(index for index, shape in enumerate(shapes) if shape.latent)
        return cls(tuple(tensors[::2]), tuple(tensors[1::2]), latent=latent)

    @property
    def capacity(self) -> int:
        """Number of tokens that fit."""
        return self.keys[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def cache(self, plan: RowsPlan) -> Cache:
        """Return a transformers cache that writes the plan's rows to this buffer, for one pass."""
        at, wait = plan.at, self.wait_for_layer
        residuals = None if self.residuals is None else self.residuals.in_pass(plan)
        layers = []
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            before_write = None if residuals is None or layer == 0 else partial(residuals.before_write, layer)
            wait_for_layer = None if wait is None else partial(wait, layer)
            visible = None if plan.visible is None or layer >= len(plan.visible) else plan.visible_at(layer)
            states = self.states if len(keys) == 1 else None
            layers.append(
                RowsLayer(
                    keys,
                    values,
                    at,
                    plan.length,
                    wait_for_layer,
                    before_write,
                    visible,
                    states,
                    latent=layer in self.latent,
                )
            )
        return Cache(layers=layers)


class RowsLayer(PlannedLayer):
    """A cache layer that writes fresh keys and values at their positions and returns all keys up to the plan's length.

    Before, it waits for the layer's stored chunks. `before_write` is called with the layer's keys and values before
    rows are written, and returns what to call afterwards.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        at: slice | Tensor,
        length: int,
        wait_for_layer: Callable[[], None] | None = None,
        before_write: Callable[[Tensor, Tensor], Callable[[], None]] | None = None,
        visible: Tensor | None = None,
        states: States | None = None,
        *,
        latent: bool = False,
    ) -> None:
        super().__init__(length, keys.shape[2], latent=latent)
        self.wait_for_layer, self.before_write = wait_for_layer, before_write
        self.visible, self.states = visible, states
        self.keys, self.values, self.at = keys, values, at

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write `[B, Hkv, R, D]` fresh keys and values to their rows; return `[B, Hkv, length, D]` views."""
        assert self.keys is not None
        assert self.values is not None
        if self.wait_for_layer is not None:  # stored chunks are placed first, because rows overwrite parts of them
            self.wait_for_layer()
        after_write = None if self.before_write is None else self.before_write(self.keys, self.values)
        self.keys[:, :, self.at] = keys
        self.values[:, :, self.at] = values
        if after_write is not None:
            after_write()
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def sequences(self) -> list[StoredSequence]:
        """Return the buffer's sequences."""
        assert self.keys is not None
        assert self.values is not None
        return [StoredSequence(self.keys, self.values, self.at, self.length, self.visible, self.states)]


@dataclass(frozen=True, slots=True, eq=False)
class PoolBlock:
    """A block of the pool's memory; compared by identity, not by content."""

    memory: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.memory)


class BufferPool:
    """A pool of host memory; a block returns to it when the last tensor that uses the block is gone.

    Safe to use from several threads, without a lock: the thread that drops the last tensor returns the block, possibly
    in the middle of its own `allocate`.

    Args:
        max_spare_bytes: limit on unused memory; beyond it, the blocks that were returned first are freed.
    """

    def __init__(self, max_spare_bytes: int = SPARE_BYTES) -> None:
        self._max_spare_bytes = max_spare_bytes
        self._spare: deque[PoolBlock] = deque()

    @property
    def spare_bytes(self) -> int:
        """Bytes of unused memory in the pool."""
        return sum(map(len, self._spare.copy()))

    def allocate(self, nbytes: int) -> Tensor:
        """Return `[nbytes]` uint8 with undefined content."""
        needed = nbytes + POOL_ALIGNMENT
        block = self._reuse_block(needed) or PoolBlock(np.empty(_block_size(needed), np.uint8))
        first = -block.memory.ctypes.data % POOL_ALIGNMENT
        view = block.memory[first : first + nbytes]  # a new object, which lives as long as a tensor uses the memory
        weakref.finalize(view, self._return_block, block).atexit = False
        return torch.from_numpy(view)

    def _reuse_block(self, nbytes: int) -> PoolBlock | None:
        """Take the smallest spare block that fits; of equal ones the last returned, which may still be in a cache."""
        newest_first = self._spare.copy()
        newest_first.reverse()
        for block in sorted(newest_first, key=len):
            if nbytes <= len(block) <= MAX_OVERSIZE * nbytes:
                try:
                    self._spare.remove(block)
                except ValueError:  # another thread has removed it
                    continue
                return block
        return None

    def _return_block(self, block: PoolBlock) -> None:
        self._spare.append(block)
        while self.spare_bytes > self._max_spare_bytes:
            try:
                self._spare.popleft()
            except IndexError:
                return


def _empty_in_block(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    length = math.prod(size)
    block = torch.empty(_block_size(length * dtype.itemsize) // dtype.itemsize, dtype=dtype, device=device)
    return block[:length].view(size)


def _block_size(nbytes: int) -> int:
    step = max(POOL_ALIGNMENT, (1 << (nbytes.bit_length() - 1)) // STEPS_PER_DOUBLING)
    return -(-nbytes // step) * step
