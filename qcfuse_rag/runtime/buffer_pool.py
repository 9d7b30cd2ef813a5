"""Memory for requests' keys and values that earlier requests have let go of.

On a CPU the first write to fresh memory waits for the system to find a page for it, which takes as long as copying the
stored caches there does. On a GPU torch's own allocator keeps what it has got, and there is nothing to add.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SPARE_BYTES = 1 << 30
ALIGNMENT = 64
"""Bytes; what vector instructions like best."""
FINENESS = 8
"""Steps between a size and twice that size: requests of nearly the same length have memory of one size."""
LOOSEST = 2
"""Times what is needed that memory may have; a short request does not hold on to a long one's."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Memory of the pool, known by itself and not by its content."""

    memory: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.memory)


class BufferPool:
    """Hands out host memory, and takes it back when no tensor lies in it any more, whoever held the last one.

    Safe to use from several threads, and without a lock: memory comes back in whatever thread drops the last tensor,
    perhaps in the midst of `take`.

    Args:
        spare_bytes: most bytes to keep while nobody uses them; beyond, what came back first goes.
    """

    def __init__(self, spare_bytes: int = SPARE_BYTES) -> None:
        self._most = spare_bytes
        self._spare: deque[Block] = deque()

    @property
    def spare_bytes(self) -> int:
        """Bytes that are kept and nobody uses."""
        return sum(map(len, self._spare.copy()))

    def take(self, nbytes: int) -> Tensor:
        """Return `[nbytes]` uint8, of any content."""
        needed = nbytes + ALIGNMENT
        block = self._fitting(needed) or Block(np.empty(_rounded(needed), np.uint8))
        first = -block.memory.ctypes.data % ALIGNMENT
        leased = block.memory[first : first + nbytes]  # an object of its own, which lives as long as a tensor needs it
        weakref.finalize(leased, self._give_back, block).atexit = False
        return torch.from_numpy(leased)

    def _fitting(self, nbytes: int) -> Block | None:
        """Take the smallest spare block that is large enough and not too large; of equal ones what came back last.

        That is the likeliest to be in a cache still, and the others grow old enough to go.
        """
        last_first = self._spare.copy()
        last_first.reverse()
        for block in sorted(last_first, key=len):
            if nbytes <= len(block) <= LOOSEST * nbytes:
                try:
                    self._spare.remove(block)
                except ValueError:  # another thread was faster
                    continue
                return block
        return None

    def _give_back(self, block: Block) -> None:
        self._spare.append(block)
        while self.spare_bytes > self._most:
            try:
                self._spare.popleft()
            except IndexError:
                return


def _rounded(nbytes: int) -> int:
    step = max(ALIGNMENT, (1 << (nbytes.bit_length() - 1)) // FINENESS)
    return -(-nbytes // step) * step
