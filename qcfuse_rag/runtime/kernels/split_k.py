"""Keys shared out between programs, and what each found put together afterwards: flash decoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from qcfuse_rag.runtime.kernels.launch import block_dim, processors

KEYS_PER_SPLIT = 256
"""Fewer are not worth a program of their own."""
MOST_SPLITS = 32
"""What one program puts together; it is compiled for so many and leaves out those that are not there."""


def splits_of(programs: int, keys: int, device: torch.device, *, warps: int = 4, uneven: bool = False) -> int:
    """Return how many parts to split keys into, that so few programs for all of them fill a device.

    Args:
        programs: there are without.
        keys: that a row may see at most.
        device: to fill.
        warps: of a program; of eight, half as many run at once.
        uneven: some programs have more keys than others, so there are to be twice as many as it runs at once: whoever
            is done early takes another.
    """
    room = max(1, 4 * processors(device) // warps)
    wanted = round(2 * room / programs) if uneven else room // programs
    return max(1, min(wanted, keys // KEYS_PER_SPLIT, MOST_SPLITS))


def check_splits(splits: int) -> None:
    """Raise `ValueError` if keys cannot be split into so many parts."""
    if not 1 <= splits <= MOST_SPLITS:
        raise ValueError(f"keys are split into 1 to {MOST_SPLITS} parts, not {splits}")


@triton.jit(do_not_specialize=["n_pairs", "splits"])
def combine(
    parts,
    maxima,
    sums,
    out,
    n_pairs,
    splits,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Put the parts of one (row, head) pair together, read all at once: each waits for memory as long as all do."""
    pair = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_VALUE)
    there = split < splits
    at = split * n_pairs + pair
    own = tl.load(maxima + at, mask=there, other=float("-inf"))
    weight = tl.exp2(own - tl.max(own, 0))  # of a part without a key that the row sees: 0
    total = tl.sum(tl.load(sums + at, mask=there, other=0.0) * weight, 0)
    part = tl.load(
        parts + at[:, None] * VALUE_DIM + dim[None, :],
        mask=there[:, None] & (dim < VALUE_DIM)[None, :],
        other=0.0,
    )
    result = tl.sum(part * weight[:, None], 0) / total
    tl.store(out + pair * VALUE_DIM + dim, result.to(out.dtype.element_ty), mask=dim < VALUE_DIM)


@dataclass(frozen=True, slots=True)
class Parts:
    """Where programs leave what they found: the output itself, or a part of it for each split of the keys.

    Attributes:
        results: the output, or `[splits, B R Hq, Dv]` float32 unnormalised sums.
        maxima, sums: `[splits, B R Hq]` float32, not looked at unless split.
        splits: how many.
    """

    results: Tensor
    maxima: Tensor
    sums: Tensor
    splits: int

    @classmethod
    def of(cls, out: Tensor, splits: int) -> Parts:
        """Make room for the parts of an output `[.., Hq, Dv]`.

        Raises:
            ValueError: if keys cannot be split into so many.
        """
        check_splits(splits)
        if splits == 1:
            return cls(out, out, out, splits)
        shape = (splits, out.numel() // out.shape[-1])
        results = torch.empty(*shape, out.shape[-1], dtype=torch.float32, device=out.device)
        maxima, sums = (torch.empty(shape, dtype=torch.float32, device=out.device) for _ in range(2))
        return cls(results, maxima, sums, splits)

    def combine(self, out: Tensor) -> None:
        """Put the parts together, if there are several."""
        if self.splits > 1:
            pairs, dim = out.numel() // out.shape[-1], out.shape[-1]
            combine[(pairs,)](
                self.results,
                self.maxima,
                self.sums,
                out,
                pairs,
                self.splits,
                VALUE_DIM=dim,
                BLOCK_VALUE=block_dim(dim),
                BLOCK_SPLITS=MOST_SPLITS,
            )
