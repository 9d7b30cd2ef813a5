"""Stored chunks that turn out damaged when they are read."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.store.chunk import ChunkKV, TensorBlocks


def damaged(chunk: ChunkKV, block: str) -> ChunkKV:
    """Return a chunk of which one block cannot be read, whatever is read before it."""

    class Damaged(TensorBlocks):
        def __getitem__(self, name: str) -> Tensor:
            if name == block:
                raise CorruptEntry(f"block {name} does not match its checksum")
            return super().__getitem__(name)

    return replace(chunk, blocks=Damaged({name: chunk.blocks[name] for name in chunk.names()}))
