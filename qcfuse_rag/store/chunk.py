"""The keys and values of one chunk, as they are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

RANKING = "ranking"


@dataclass(frozen=True, slots=True, eq=False)
class ChunkKV:
    """Keys and values of a chunk's tokens at every layer, born in one forward pass over exact text.

    Attributes:
        n_tokens: length of the chunk.
        n_layers: layers of the model.
        blocks: named tensors. `key.L` and `value.L`: `[Hkv, n_tokens, D]` in the model's dtype, keys unrotated (after
            a model's own key norm, at position 0). `ranking`: `[n_layers, n_tokens]` int32, token indices by falling
            importance, see `ingest.anchors`. A mapping that reads from a store may raise `CorruptEntry` on access.
    """

    n_tokens: int
    n_layers: int
    blocks: Mapping[str, Tensor]

    @classmethod
    def of(cls, keys: list[Tensor], values: list[Tensor], ranking: Tensor) -> ChunkKV:
        """Assemble a chunk from per-layer tensors."""
        blocks: dict[str, Tensor] = {RANKING: ranking.to(torch.int32)}
        for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
            blocks[f"key.{layer}"], blocks[f"value.{layer}"] = key, value
        return cls(n_tokens=keys[0].shape[1], n_layers=len(keys), blocks=blocks)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, each `[Hkv, n_tokens, D]`."""
        return self.blocks[f"key.{index}"], self.blocks[f"value.{index}"]

    def anchors(self, layer: int, ratio: float) -> Tensor:
        """Return the `ceil(ratio * n_tokens)` most important tokens of a layer, ascending indices in the chunk."""
        return self.blocks[RANKING][layer, : math.ceil(ratio * self.n_tokens)].to(torch.int64).sort().values

    def names(self) -> list[str]:
        """Return the block names in the order they are stored and read: ranking, then layer by layer."""
        layers = range(self.n_layers)
        return [RANKING, *(f"{kind}.{layer}" for layer in layers for kind in ("key", "value"))]

    def read(self) -> None:
        """Read every block, which checks those of a store.

        Raises:
            CorruptEntry: if one fails its check.
        """
        for name in self.names():
            self.blocks[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks; reads them."""
        return sum(self.blocks[name].nbytes for name in self.names())
