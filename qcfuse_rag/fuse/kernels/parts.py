"""Keys shared out between programs, and what each found put together afterwards: flash decoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from qcfuse_rag.fuse.kernels.launch import block_dim

KEYS_PER_SPLIT = 256
"""Fewer are not worth a program of their own."""


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
):
    """Put the parts of one (row, head) pair together."""
    pair = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK_VALUE)
    inside = dim < VALUE_DIM
    largest = tl.load(maxima + pair)
    for split in range(1, splits):
        largest = tl.maximum(largest, tl.load(maxima + split * n_pairs + pair))
    result = tl.zeros([BLOCK_VALUE], tl.float32)
    total = 0.0
    for split in range(splits):
        at = split * n_pairs + pair
        weight = tl.exp2(tl.load(maxima + at) - largest)
        total += tl.load(sums + at) * weight
        result += tl.load(parts + at * VALUE_DIM + dim, mask=inside, other=0.0) * weight
    tl.store(out + pair * VALUE_DIM + dim, (result / total).to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Parts:
    """Where programs leave what they found: the output itself, or a part of it for each split of the keys.

    Attributes:
        results: the output, or `[splits, R, Hq, Dv]` float32 unnormalised sums.
        maxima, sums: `[splits, R, Hq]` float32, not looked at unless split.
        splits: how many.
    """

    results: Tensor
    maxima: Tensor
    sums: Tensor
    splits: int

    @classmethod
    def of(cls, out: Tensor, splits: int) -> Parts:
        """Make room for the parts of an output `[.., Hq, Dv]`."""
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
            )
