"""The keys and values of one chunk, as a store keeps them."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qcfuse_rag.store.quantization import (
    LOSSLESS,
    RANKS,
    check_kv_dtype,
    dequantize,
    factorize,
    multiply_factors,
    quantize,
    side_block,
)

KINDS = ("key", "value")
SLAB_ALIGNMENT = 256
"""Bytes; kernels and every dtype can read a block at such an offset."""


class Blocks:
    """Named tensors of a chunk; rows are tokens where tokens are the first dimension. Those of this class are given."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows `start <= r < stop` of a block; a store reads only the pieces they are in."""
        return self[name][start:stop]


class PreloadedBlocks(Blocks):
    """Blocks of which some are read at once and kept in memory, whether or not the store caches them.

    Made for probes, which run when it is too late to wait for the store or to drop the chunk.
    """

    def __init__(self, blocks: Blocks, names: Iterable[str]) -> None:
        super().__init__({name: blocks[name] for name in names})
        self._blocks = blocks

    def __getitem__(self, name: str) -> Tensor:
        return (self._tensors if name in self._tensors else self._blocks)[name]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a block."""
        return self[name][start:stop] if name in self._tensors else self._blocks.rows(name, start, stop)


class BlockForm(NamedTuple):
    """The form of a layer's keys or values, the same in every chunk of a format."""

    dtype: torch.dtype  # of the stored numbers
    heads: int
    dim: int
    scaled: bool
    by_token: bool  # whether there is a scale for each token and head, and not one for each channel


@dataclass(frozen=True, slots=True, eq=False)
class SlabLayout:
    """The places of all layers' blocks in an allocation.

    Attributes:
        offsets: `[n_layers, 2, 2]` int64: of keys and values, the first byte of the numbers and of their scales; -1
            where there are no scales.
    """

    n_tokens: int  # tokens of every block
    offsets: NDArray[np.int64]
    bounds: tuple[int, ...]  # `[n_layers + 1]`: a layer's blocks lie between its number and the next
    sizes: tuple[int, ...]  # bytes of each layer's blocks, without what lies between them
    forms: tuple[tuple[BlockForm, BlockForm], ...]  # of each layer's keys and values


class SlabBlocks(Blocks):
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
        """Copy blocks into a new allocation, in their order: those of layers last, and layer by layer."""
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


RANKING = "ranking"


@dataclass(frozen=True, slots=True, eq=False)
class ChunkKV:
    """Keys and values of a chunk's tokens at every layer, computed in one forward pass over exact text.

    Attributes:
        n_tokens: length of the chunk.
        n_layers: layers of the model.
        dtype: the model's dtype, which `layer` returns.
        kv_dtype: format of keys and values, see `store.quantization`.
        expires: unix time from which on it must not be used, or None.
        blocks: `key.L` and `value.L`: `[n_tokens, Hkv, D]`, keys unrotated (after a model's own key norm, at position
            0), with `key.L.scale` and `value.L.scale` beside them where `kv_dtype` needs them; in a format of low rank
            `[n_tokens, m]`, with `key.L.basis` and `value.L.basis` `[m, Hkv, D]`. `ranking`: `[n_layers, n_tokens]`
            int32, token indices by falling importance, see `ingestion.prefill`. Stored blocks may raise `CorruptEntry`
            or `OSError` on access.
        notes: what a method noted when it made the chunk, JSON by header field; nothing else reads it.
        extras: names of additional blocks of a method, `[n_tokens, 1]` float32.

    Raises:
        ValueError: if a note or an extra block has a name that is taken, or a note is no JSON.
    """

    n_tokens: int
    n_layers: int
    dtype: torch.dtype
    kv_dtype: str
    expires: float | None
    blocks: Blocks
    notes: Mapping[str, Any] = field(default_factory=dict)
    extras: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_notes(self.notes, self.extras)

    @classmethod
    def of(
        cls,
        keys: list[Tensor],
        values: list[Tensor],
        ranking: Tensor,
        *,
        notes: Mapping[str, Any] | None = None,
        extras: Mapping[str, Tensor] | None = None,
    ) -> ChunkKV:
        """Build a chunk from its layers' tensors.

        Args:
            keys: per layer `[Hkv, n_tokens, D]`, unrotated, in the model's dtype.
            values: per layer `[Hkv, n_tokens, Dv]`.
            ranking: `[n_layers, n_tokens]` token indices by falling importance.
            notes: see `ChunkKV`.
            extras: additional blocks by name, `[n_tokens]` or `[n_tokens, 1]`.
        """
        tensors: dict[str, Tensor] = {RANKING: ranking.to(torch.int32).contiguous()}
        extra_blocks = extras or {}
        for name, block in extra_blocks.items():
            tensors[name] = block.to(torch.float32).reshape(-1, 1).contiguous()
        for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
            tensors[f"key.{layer}"] = key.transpose(0, 1).contiguous()
            tensors[f"value.{layer}"] = value.transpose(0, 1).contiguous()
        n_tokens, dtype = keys[0].shape[1], keys[0].dtype
        names = tuple(extra_blocks)
        return cls(n_tokens, len(keys), dtype, LOSSLESS, None, Blocks(tensors), notes or {}, names)

    def layer(self, index: int, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, each `[Hkv, stop - start, D]` in the model's dtype; all tokens by default.

        A store reads only the pieces that the tokens are in.
        """
        return self.part("key", index, start, stop), self.part("value", index, start, stop)

    def part(self, kind: str, index: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the keys (`kind` is `key`) or the values (`value`) of a layer alone; see `layer`."""
        name, stop = f"{kind}.{index}", self.n_tokens if stop is None else stop
        whole = start == 0 and stop == self.n_tokens
        block = self.blocks[name] if whole else self.blocks.rows(name, start, stop)
        side = side_block(self.kv_dtype)
        if side == "basis":
            block = multiply_factors(block, self.blocks[f"{name}.basis"], self.dtype)
        elif side == "scale":
            scale = self.blocks[f"{name}.scale"]
            block = dequantize(block, scale[start:stop] if kind == "value" else scale, self.dtype)
        return block.transpose(0, 1)

    def anchors(self, ratio: float) -> Tensor:
        """Return the most important tokens of each layer: `[n_layers, ceil(ratio * n_tokens)]` ascending indices."""
        return self.blocks[RANKING][:, : math.ceil(ratio * self.n_tokens)].to(torch.int64).sort().values

    def ready_to_probe(self) -> ChunkKV:
        """Return the chunk with the blocks that probes need, its ranking and its extras, in memory."""
        if isinstance(self.blocks, SlabBlocks):
            return self
        return replace(self, blocks=PreloadedBlocks(self.blocks, (RANKING, *self.extras)))

    def names(self) -> list[str]:
        """Return the block names in the order they are stored."""
        return block_names(self.n_layers, self.kv_dtype, self.extras)

    def layer_names(self, layer: int) -> list[str]:
        """Return the names of a layer's blocks."""
        return _layer_names(layer, self.kv_dtype)

    def copied(self, device: torch.device | str = "cpu", *, pinned: bool = False) -> ChunkKV:
        """Return a copy in memory, with every block read and checked."""
        blocks = {name: self.blocks[name] for name in self.names()}
        return replace(self, blocks=SlabBlocks.copy_of(blocks, self.n_layers, device=device, pinned=pinned))

    def with_blocks(self, tensors: dict[str, Tensor], kv_dtype: str) -> ChunkKV:
        """Return the same chunk with other blocks."""
        return replace(self, kv_dtype=kv_dtype, blocks=Blocks(tensors))

    def with_expiry(self, expires: float | None) -> ChunkKV:
        """Return the same chunk with an expiry in unix time, unless it has one already."""
        return self if expires is None or self.expires is not None else replace(self, expires=expires)

    def with_ttl(self, ttl_s: float | None) -> ChunkKV:
        """Return the same chunk with an expiry in so many seconds, unless it has one already."""
        return self.with_expiry(None if ttl_s is None else time.time() + ttl_s)

    @property
    def expired(self) -> bool:
        """Whether it has expired."""
        return self.expires is not None and time.time() >= self.expires

    def read(self) -> None:
        """Read every block; this checks the blocks of a store; raises `CorruptEntry` if a block fails its check."""
        for name in self.names():
            self.blocks[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks; reads them."""
        return sum(self.blocks[name].nbytes for name in self.names())


HEADER_FIELDS = frozenset(
    ("key", "tokens", "layers", "dtype", "numbers", "probe_layers", "expires", "extras", "blocks", "version")
)
"""Header fields that a method must not write."""

NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


def check_notes(notes: Mapping[str, Any], extras: Sequence[str]) -> None:
    """Check the names of a method's header fields and blocks, and that the fields are JSON; see `ChunkKV`."""
    names = [*notes, *extras]
    if not names:
        return
    if not all(type(name) is str and NAME.fullmatch(name) for name in names) or len(set(extras)) < len(extras):
        raise ValueError("invalid names of notes or blocks: give each a name of its own, of small letters")
    if HEADER_FIELDS & set(notes) or {RANKING, *KINDS} & set(extras):
        raise ValueError(f"invalid names of notes or blocks: {', '.join(names)} are taken")
    try:
        json.dumps(dict(notes), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"invalid notes: {error}") from error


def block_names(n_layers: int, kv_dtype: str, extras: tuple[str, ...] = ()) -> list[str]:
    """Return the names of a chunk's blocks in the order they are stored."""
    return [RANKING, *extras, *(name for layer in range(n_layers) for name in _layer_names(layer, kv_dtype))]


def _layer_names(layer: int, kv_dtype: str) -> list[str]:
    side = side_block(kv_dtype)
    names = [f"{kind}.{layer}" for kind in KINDS]
    return names if side is None else [block for name in names for block in (f"{name}.{side}", name)]


def to_format(chunk: ChunkKV, kv_dtype: str) -> ChunkKV:
    """Return a chunk with its keys and values written in another format.

    Args:
        chunk: in any format; lost precision does not come back.
        kv_dtype: one of `FORMATS`. Low rank loses most of a whole cache, and little of a difference between caches.
    """
    if kv_dtype not in RANKS:
        check_kv_dtype(kv_dtype)
    if chunk.kv_dtype == kv_dtype:
        return chunk
    tensors = {name: chunk.blocks[name] for name in (RANKING, *chunk.extras)}
    for layer in range(chunk.n_layers):
        for kind, block in zip(KINDS, chunk.layer(layer), strict=True):
            tokens = (block.cpu() if block.device.type == "mps" else block).transpose(0, 1)  # has no float64
            if kv_dtype == LOSSLESS:
                tensors[f"{kind}.{layer}"] = tokens.contiguous()
            elif kv_dtype in RANKS:
                tensors[f"{kind}.{layer}"], tensors[f"{kind}.{layer}.basis"] = factorize(tokens, kv_dtype)
            else:
                quantized, scale = quantize(tokens, over=0 if kind == "key" else 2)
                tensors[f"{kind}.{layer}"], tensors[f"{kind}.{layer}.scale"] = quantized, scale
    return chunk.with_blocks(tensors, kv_dtype)


def to_store_format(chunk: ChunkKV, kv_dtype: str) -> ChunkKV:
    """Return a chunk as a store of this format keeps it: only lossless chunks are converted."""
    return to_format(chunk, kv_dtype) if chunk.kv_dtype == LOSSLESS else chunk


class SlicedBlocks(Blocks):
    """Blocks of some of a chunk's tokens; a store reads and checks no others."""

    def __init__(self, blocks: Blocks, start: int, stop: int) -> None:
        self._blocks, self._start, self._stop = blocks, start, stop

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a block, counted from the beginning of the slice."""
        if self._is_shared(name):
            return self[name][start:stop]
        return self._blocks.rows(name, self._start + start, self._start + stop)

    def __getitem__(self, name: str) -> Tensor:
        if name == RANKING:
            ranking = self._blocks[name]
            inside = (ranking >= self._start) & (ranking < self._stop)  # equally many in every layer
            return (ranking[inside] - self._start).reshape(len(ranking), -1)
        if self._is_shared(name):
            return self._blocks[name]
        return self._blocks.rows(name, self._start, self._stop)

    @staticmethod
    def _is_shared(name: str) -> bool:
        """Return whether a block's first dimension is not tokens: the ranking, scales of channels, and bases."""
        return name == RANKING or name.endswith(".basis") or (name.startswith("key.") and name.endswith(".scale"))


def slice_chunk(chunk: ChunkKV, start: int, stop: int) -> ChunkKV:
    """Return tokens `start <= t < stop` of a chunk; keys are unrotated, so nothing else changes.

    Raises:
        ValueError: if the chunk does not have these tokens.
    """
    if not 0 <= start < stop <= chunk.n_tokens:
        raise ValueError(f"a chunk of {chunk.n_tokens} tokens has none from {start} to {stop}")
    return replace(chunk, n_tokens=stop - start, blocks=SlicedBlocks(chunk.blocks, start, stop))
