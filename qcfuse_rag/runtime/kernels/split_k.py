"""Split the keys of a row between programs and combine their partial results: flash decoding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qcfuse_rag.runtime.kernels.launch import block_dim, concurrent_programs, dependent_launch, wait_for_inputs

KEYS_PER_SPLIT = 256
"""Fewest keys that are worth a program."""
TWO_SPLITS, FEW_SPLITS, MAX_SPLITS = 2, 32, 128
"""Most parts that one program combines: it is compiled for 2, 32, 64 or 128 and masks those that are missing. Many rows
have two parts. With one or two key heads, 32 parts would leave most of a large GPU without a program."""


def num_splits(
    programs: int, keys: int, device: torch.device, *, warps: int = 4, uneven: bool = False, most: int = MAX_SPLITS
) -> int:
    """Return the number of parts to split keys into, so that programs fill a device.

    Half as many programs of eight warps run at once. If some programs have more keys than others (`uneven`), twice as
    many are wanted as run at once, so that a multiprocessor that finishes early starts another.
    """
    capacity = max(1, 4 * concurrent_programs(device) // warps)
    wanted = round(2 * capacity / programs) if uneven else capacity // programs
    return max(1, min(wanted, keys // KEYS_PER_SPLIT, most))


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
    BLOCK_PAIRS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Combine the parts of some (row, head) pairs, all loaded at once: one load takes as long as all of them."""
    wait_for_inputs(DEPENDENT)
    pair = tl.program_id(0).to(tl.int64) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    split, dim = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_VALUE)
    active, inside = pair < n_pairs, (dim < VALUE_DIM)[None, :]
    valid = active[:, None] & (split < splits)[None, :]
    index = split[None, :] * n_pairs + pair[:, None]
    maximum = tl.load(maxima + index, mask=valid, other=float("-inf"))
    largest = tl.where(active, tl.max(maximum, 1), 0.0)
    weight = tl.exp2(maximum - largest[:, None])  # 0 for a part without a visible key
    total = tl.sum(tl.load(sums + index, mask=valid, other=0.0) * weight, 1)
    part = tl.load(
        parts + index[:, :, None] * VALUE_DIM + dim[None, None, :],
        mask=valid[:, :, None] & inside[None, :, :],
        other=0.0,
    )
    result = tl.sum(part * weight[:, :, None], 1) / tl.where(active, total, 1.0)[:, None]
    to = out + pair[:, None] * VALUE_DIM + dim[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=active[:, None] & inside)


def allocate_parts(out: Tensor, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate what programs write for an output `[.., Hq, Dv]`: the output itself, or one part for each split.

    Parts are float32: `[splits, B R Hq, Dv]` unnormalised sums, `[splits, B R Hq]` largest exponents and softmax sums.
    """
    if splits == 1:
        return out, out, out
    shape = (splits, out.numel() // out.shape[-1])
    results = torch.empty(*shape, out.shape[-1], dtype=torch.float32, device=out.device)
    maxima, sums = (torch.empty(shape, dtype=torch.float32, device=out.device) for _ in range(2))
    return results, maxima, sums


def combine_parts(results: Tensor, maxima: Tensor, sums: Tensor, out: Tensor) -> None:
    """Combine several parts, see `allocate_parts`, into the output."""
    splits, pairs, dim = results.shape
    few = TWO_SPLITS if splits <= TWO_SPLITS else FEW_SPLITS
    block_splits = max(few, triton.next_power_of_2(splits))
    block_pairs = max(1, FEW_SPLITS // block_splits)
    combine[(triton.cdiv(pairs, block_pairs),)](
        results,
        maxima,
        sums,
        out,
        pairs,
        splits,
        VALUE_DIM=dim,
        BLOCK_VALUE=block_dim(dim),
        BLOCK_SPLITS=block_splits,
        BLOCK_PAIRS=block_pairs,
        num_warps=4 if block_splits <= FEW_SPLITS else 8,
        **dependent_launch(out.device),
    )
