"""Fetch what a slot holds, every byte checked, before anything is built on it."""

from __future__ import annotations

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.ingest.context import Slot
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.contract import KVStore


def sound(store: KVStore, slot: Slot) -> ChunkKV | None:
    """Return a slot's entry, read and checked, which counts as a use; None if there is no whole one any more.

    A damaged entry is discarded: what is made of it later could not tell which of its parts was damaged.
    """
    found = store.get(slot.key)
    if not isinstance(found, ChunkKV) or found.context != slot.context or found.n_tokens != slot.chunk.n_tokens:
        return None
    try:
        found.read()
    except CorruptEntry as error:
        store.discard(slot.key, str(error))
        return None
    except OSError:
        return None
    return found
