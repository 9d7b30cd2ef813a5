"""Open the store most programs want: a folder on disk behind a tier in memory."""

from __future__ import annotations

from pathlib import Path

from qcfuse_rag.store.contract import KVStore
from qcfuse_rag.store.disk import DiskStore
from qcfuse_rag.store.memory import MemoryStore
from qcfuse_rag.store.tiered import TieredStore


def open_store(folder: str | Path | None = None, *, disk_bytes: int = 64 << 30, memory_bytes: int = 2 << 30) -> KVStore:
    """Open a store.

    Args:
        folder: where chunks are kept; None keeps them in memory only, until the process ends.
        disk_bytes: size to which the disk tier evicts.
        memory_bytes: size to which the memory tier evicts.

    Raises:
        StoreError: if the folder cannot be used.
    """
    memory = MemoryStore(memory_bytes)
    return memory if folder is None else TieredStore(memory, DiskStore(folder, disk_bytes))
