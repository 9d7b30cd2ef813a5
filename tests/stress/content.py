"""Chunks that can be told from their number alone: what any read of them must give, byte for byte."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from qcfuse_rag.store.chunk import ChunkKV, to_format
from qcfuse_rag.store.testing import example_chunk

SIZES = (1, 5, 40, 129, 300, 700)
"""Tokens: below, at and beyond one piece of a block."""

LARGEST_BYTES = 300_000
"""More than any entry of these chunks takes."""


@cache
def chunk_of(number: int, kv_dtype: str = "model") -> ChunkKV:
    """Return what is stored under `example_key(number)`, in a number format."""
    return to_format(example_chunk(number, n_tokens=SIZES[number % len(SIZES)]), kv_dtype)


def wrong_bytes(found: ChunkKV, expected: ChunkKV) -> int:
    """Return how many bytes of a chunk are not as they were written; a block of another form is wrong as a whole.

    Raises:
        CorruptEntry: if a block was recognised as damaged.
    """
    wrong = 0
    for name in expected.names():
        read, written = found.blocks[name], expected.blocks[name]
        if read.dtype != written.dtype or read.shape != written.shape:
            wrong += written.nbytes
        else:
            differing = read.contiguous().view(torch.uint8) != written.contiguous().view(torch.uint8)
            wrong += int(differing.sum())
    return wrong


def files_of(folder: Path) -> dict[Path, int]:
    """Return the files that count against a store's limit, with their sizes."""
    sizes = {}
    for part in ("tmp", "objects", "quarantine"):
        for path in (folder / part).rglob("*"):
            try:
                if path.is_file():
                    sizes[path] = path.stat().st_size
            except FileNotFoundError:
                continue  # gone between being listed and being looked at
    return sizes
