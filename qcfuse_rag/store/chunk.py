"""The keys and values of one chunk, as a store keeps them."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from qcfuse_rag.store.blocks import KINDS, Blocks, PreloadedBlocks, SlabBlocks, TensorBlocks
from qcfuse_rag.store.quantization import (
    LOSSLESS,
    RANKS,
    check_numbers,
    dequantize,
    factorize,
    multiply_factors,
    quantize,
    side_block,
)

RANKING = "ranking"


@dataclass(frozen=True, slots=True, eq=False)
class ChunkKV:
    """Keys and values of a chunk's tokens at every layer, computed in one forward pass over exact text.

    Attributes:
        n_tokens: length of the chunk.
        n_layers: layers of the model.
        dtype: the model's dtype, which `layer` returns.
        numbers: format of keys and values, see `store.quantization`.
        expires: unix time from which on it must not be used, or None.
        blocks: `key.L` and `value.L`: `[n_tokens, Hkv, D]`, keys unrotated (after a model's own key norm, at position
            0), with `key.L.scale` and `value.L.scale` beside them where `numbers` needs them; in a format of low rank
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
    numbers: str
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

        Raises:
            ValueError: if notes or extras are invalid.
        """
        tensors: dict[str, Tensor] = {RANKING: ranking.to(torch.int32).contiguous()}
        extra_blocks = extras or {}
        for name, block in extra_blocks.items():
            tensors[name] = block.to(torch.float32).reshape(-1, 1).contiguous()
        for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
            tensors[f"key.{layer}"] = key.transpose(0, 1).contiguous()
            tensors[f"value.{layer}"] = value.transpose(0, 1).contiguous()
        n_tokens, dtype = keys[0].shape[1], keys[0].dtype
        blocks, names = TensorBlocks(tensors), tuple(extra_blocks)
        return cls(n_tokens, len(keys), dtype, LOSSLESS, None, blocks, notes or {}, names)

    def layer(self, index: int, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, each `[Hkv, stop - start, D]` in the model's dtype.

        Args:
            index: the layer.
            start: first token.
            stop: token after the last, or None for all; a store reads only the pieces they are in.
        """
        return self.part("key", index, start, stop), self.part("value", index, start, stop)

    def part(self, kind: str, index: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the keys (`kind` is `key`) or the values (`value`) of a layer alone; see `layer`."""
        return self._dequantized(f"{kind}.{index}", start, self.n_tokens if stop is None else stop)

    def anchors(self, ratio: float) -> Tensor:
        """Return the most important tokens of each layer: `[n_layers, ceil(ratio * n_tokens)]` ascending indices."""
        return self.blocks[RANKING][:, : math.ceil(ratio * self.n_tokens)].to(torch.int64).sort().values

    def ready_to_probe(self) -> ChunkKV:
        """Return the chunk with the blocks that probes need, its ranking and its extras, in memory.

        Raises:
            CorruptEntry: if a block fails its check.
            OSError: if a block cannot be read.
        """
        if isinstance(self.blocks, SlabBlocks):
            return self
        return replace(self, blocks=PreloadedBlocks(self.blocks, (RANKING, *self.extras)))

    def names(self) -> list[str]:
        """Return the block names in the order they are stored."""
        return block_names(self.n_layers, self.numbers, self.extras)

    def layer_names(self, layer: int) -> list[str]:
        """Return the names of a layer's blocks."""
        side = side_block(self.numbers)
        names = [f"{kind}.{layer}" for kind in KINDS]
        return names if side is None else [block for name in names for block in (f"{name}.{side}", name)]

    def copied(self, device: torch.device | str = "cpu", *, pinned: bool = False) -> ChunkKV:
        """Return a copy in memory, with every block read and checked.

        All blocks lie in one allocation, layer after layer: a GPU page-locks them by one call, and copies several
        layers by one.

        Args:
            device: of the copy.
            pinned: page-lock host memory, so that a GPU can copy from it while computing.

        Raises:
            CorruptEntry: if a stored block fails its check.
        """
        layers = [name for layer in range(self.n_layers) for name in self.layer_names(layer)]
        blocks = {name: self.blocks[name] for name in (RANKING, *self.extras, *layers)}
        return replace(self, blocks=SlabBlocks.copy_of(blocks, self.n_layers, device=device, pinned=pinned))

    def with_blocks(self, tensors: dict[str, Tensor], numbers: str) -> ChunkKV:
        """Return the same chunk with other blocks."""
        return replace(self, numbers=numbers, blocks=TensorBlocks(tensors))

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
        """Read every block; this checks the blocks of a store.

        Raises:
            CorruptEntry: if a block fails its check.
        """
        for name in self.names():
            self.blocks[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks; reads them."""
        return sum(self.blocks[name].nbytes for name in self.names())

    def _dequantized(self, name: str, start: int, stop: int) -> Tensor:
        whole = start == 0 and stop == self.n_tokens
        block = self.blocks[name] if whole else self.blocks.rows(name, start, stop)
        side = side_block(self.numbers)
        if side == "basis":
            block = multiply_factors(block, self.blocks[f"{name}.basis"], self.dtype)
        elif side == "scale":
            scale = self.blocks[f"{name}.scale"]
            block = dequantize(block, scale[start:stop] if name.startswith("value") else scale, self.dtype)
        return block.transpose(0, 1)


HEADER_FIELDS = frozenset(
    ("key", "tokens", "layers", "dtype", "numbers", "probe_layers", "expires", "extras", "blocks", "version")
)
"""Header fields that a method must not write."""

NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


def check_notes(notes: Mapping[str, Any], extras: Sequence[str]) -> None:
    """Check the names of a method's header fields and blocks.

    Raises:
        ValueError: if a name is taken, too long or not of small letters, or a value is no JSON.
    """
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


def block_names(n_layers: int, numbers: str, extras: tuple[str, ...] = ()) -> list[str]:
    """Return the names of a chunk's blocks in the order they are stored."""
    names = [f"{kind}.{layer}" for layer in range(n_layers) for kind in KINDS]
    side = side_block(numbers)
    if side is None:
        return [RANKING, *extras, *names]
    return [RANKING, *extras, *(block for name in names for block in (f"{name}.{side}", name))]


def to_format(chunk: ChunkKV, numbers: str) -> ChunkKV:
    """Return a chunk with its keys and values written in another format.

    Args:
        chunk: in any format; lost precision does not come back.
        numbers: one of `FORMATS`. Low rank loses most of a whole cache, and little of a difference between caches.

    Raises:
        ValueError: if there is no such format.
    """
    if numbers not in RANKS:
        check_numbers(numbers)
    if chunk.numbers == numbers:
        return chunk
    tensors = {name: chunk.blocks[name] for name in ("ranking", *chunk.extras)}
    for layer in range(chunk.n_layers):
        for kind, block in zip(("key", "value"), chunk.layer(layer), strict=True):
            tokens = (block.cpu() if block.device.type == "mps" else block).transpose(0, 1)  # has no fp8 and float64
            if numbers == LOSSLESS:
                tensors[f"{kind}.{layer}"] = tokens.contiguous()
            elif numbers in RANKS:
                tensors[f"{kind}.{layer}"], tensors[f"{kind}.{layer}.basis"] = factorize(tokens, numbers)
            else:
                quantized, scale = quantize(tokens, numbers, over=0 if kind == "key" else 2)
                tensors[f"{kind}.{layer}"], tensors[f"{kind}.{layer}.scale"] = quantized, scale
    return chunk.with_blocks(tensors, numbers)


def to_store_format(chunk: ChunkKV, numbers: str) -> ChunkKV:
    """Return a chunk as a store of this format keeps it: only lossless chunks are converted."""
    return to_format(chunk, numbers) if chunk.numbers == LOSSLESS else chunk
