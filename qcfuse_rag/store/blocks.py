"""The named tensors of a chunk: in memory, in one allocation, or behind a store."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KINDS = ("key", "value")
SLAB_ALIGNMENT = 256
"""Bytes; kernels and every dtype can read a block at such an offset."""


class Blocks(Mapping[str, Tensor]):
    """Named tensors of a chunk; rows are tokens where tokens are the first dimension."""

    @abstractmethod
    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows `start <= r < stop` of a block; a store reads only the pieces they are in."""


class TensorBlocks(Blocks):
    """Blocks in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a block, a view."""
        return self._tensors[name][start:stop]

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class PreloadedBlocks(Blocks):
    """Blocks of which some are read at once and kept in memory, whether or not the store caches them.

    Made for probes, which run when it is too late to wait for the store or to drop the chunk.
    """

    def __init__(self, blocks: Blocks, names: Iterable[str]) -> None:
        self._blocks = blocks
        self._preloaded = {name: blocks[name] for name in names}

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a block."""
        block = self._preloaded.get(name)
        return self._blocks.rows(name, start, stop) if block is None else block[start:stop]

    def __getitem__(self, name: str) -> Tensor:
        block = self._preloaded.get(name)
        return self._blocks[name] if block is None else block

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)


class BlockForm(NamedTuple):
    """The form of a layer's keys or values, the same in every chunk of a format.

    Attributes:
        dtype: of the stored numbers.
        heads: number of heads.
        dim: channels of a head.
        scaled: whether there are scales.
        by_token: whether there is a scale for each token and head, and not one for each channel.
    """

    dtype: torch.dtype
    heads: int
    dim: int
    scaled: bool
    by_token: bool


@dataclass(frozen=True, slots=True, eq=False)
class SlabLayout:
    """The places of all layers' blocks in an allocation.

    Attributes:
        n_tokens: tokens of every block.
        offsets: `[n_layers, 2, 2]` int64: of keys and values, the first byte of the numbers and of their scales; -1
            where there are no scales.
        bounds: `[n_layers + 1]`: a layer's blocks lie between its number and the next.
        sizes: bytes of each layer's blocks, without what lies between them.
        forms: of each layer's keys and values.
    """

    n_tokens: int
    offsets: NDArray[np.int64]
    bounds: tuple[int, ...]
    sizes: tuple[int, ...]
    forms: tuple[tuple[BlockForm, BlockForm], ...]


class SlabBlocks(TensorBlocks):
    """Blocks in one allocation, layer after layer: a GPU page-locks them by one call, and copies several by one.

    Args:
        tensors: views of the allocation.
        memory: `[n]` uint8, the allocation.
        layout: where the blocks lie; None if one is not `[n, H, D]`, with scales for channels or tokens where there are
            some. Blocks of low rank are not: they are expanded before they are placed.
    """

    def __init__(self, tensors: dict[str, Tensor], memory: Tensor, layout: SlabLayout | None) -> None:
        super().__init__(tensors)
        self.memory, self.layout = memory, layout

    @classmethod
    def copy_of(cls, blocks: Mapping[str, Tensor], n_layers: int, *, device: torch.device | str, pinned: bool) -> Self:
        """Copy blocks into a new allocation, in their order: those of layers last, and layer by layer.

        Args:
            blocks: the blocks.
            n_layers: number of layers.
            device: of the allocation.
            pinned: page-lock host memory.
        """
        stops = list(accumulate(map(aligned_size, blocks.values())))
        memory = torch.empty(stops[-1], dtype=torch.uint8, device=device, pin_memory=pinned)
        tensors, starts = {}, dict(zip(blocks, (0, *stops), strict=False))
        for name, block in blocks.items():
            start = starts[name]
            tensors[name] = memory[start : start + block.nbytes].view(block.dtype).view(block.shape)
            tensors[name].copy_(block)
        return cls(tensors, memory, _layout(tensors, n_layers, starts, stops[-1]))


def aligned_size(block: Tensor) -> int:
    """Return the bytes of a block, rounded up so that the next one is aligned."""
    return -(-block.nbytes // SLAB_ALIGNMENT) * SLAB_ALIGNMENT


def _layout(tensors: Mapping[str, Tensor], n_layers: int, starts: Mapping[str, int], stop: int) -> SlabLayout | None:
    """Return where blocks lie; None if one of them is of another shape than placement knows."""
    n_tokens = len(tensors["key.0"])
    names = [[f"{kind}.{layer}" for kind in KINDS] for layer in range(n_layers)]
    forms = [[_form(tensors[name], tensors.get(f"{name}.scale"), n_tokens) for name in layer] for layer in names]
    pairs = tuple((keys, values) for keys, values in forms if keys is not None and values is not None)
    if len(pairs) < n_layers or any(f"{kind}.0.basis" in tensors for kind in KINDS):
        return None
    offsets = np.array(
        [[[starts[name], starts.get(f"{name}.scale", -1)] for name in layer] for layer in names], np.int64
    )
    firsts = np.where(offsets < 0, stop, offsets).min(axis=(1, 2))
    blocks = [(tensors[name], tensors.get(f"{name}.scale")) for layer in names for name in layer]
    nbytes = [block.nbytes + (0 if scale is None else scale.nbytes) for block, scale in blocks]
    sizes = tuple(map(sum, zip(nbytes[::2], nbytes[1::2], strict=True)))
    return SlabLayout(n_tokens, offsets, (*map(int, firsts), stop), sizes, pairs)


def _form(block: Tensor, scale: Tensor | None, n_tokens: int) -> BlockForm | None:
    if block.dim() != 3 or len(block) != n_tokens:
        return None
    _, heads, dim = block.shape
    if scale is not None and scale.shape not in ((1, heads, dim), (n_tokens, heads, 1)):
        return None
    return BlockForm(block.dtype, heads, dim, scale is not None, scale is not None and scale.shape[2] == 1)
