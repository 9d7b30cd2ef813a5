"""Slots: the keys under which caches of one chunk in different contexts are stored.

The context of such a cache cannot be part of its key: a reader does not know which contexts exist. Each chunk has a few
numbered slots instead, and a reader tries them all: `variant-0`, `variant-1`, ... for whole caches, `difference-0`, ...
for what a context adds to the framed cache, and `patch-0`, ... for that difference in low rank. The header of each
entry names its context, so there is no index that could be lost or out of date.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from qcfuse_rag.models.fingerprint import Fingerprint
from qcfuse_rag.store.backends.base import KVStore, Miss, check_entry
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.prefill_base import Base
from qcfuse_rag.store.provenance import Context

SlotKind = Literal["variant", "difference", "patch"]

TURN = "turn"
"""Fact of a captured chunk: how many of its kind were captured of the same text before it."""

OLDEST = 5


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A slot with an entry.

    Attributes:
        number: of the slot.
        key: of its entry.
        chunk: the entry; blocks are unread where the store allows it.
        context: the chunks it was prefilled behind, see `ChunkKV.context`.
    """

    number: int
    key: ChunkKey
    chunk: ChunkKV
    context: Context

    @property
    def turn(self) -> float:
        """How many were captured before it; smaller is older."""
        return next(iter(self.chunk.facts.get(TURN, ())), 0.0)


def slot_key(
    kind: SlotKind, number: int, fingerprint: Fingerprint, prefix_ids: tuple[int, ...], ids: tuple[int, ...]
) -> ChunkKey:
    """Return the key of a chunk's slot.

    Args:
        kind: `variant`, `difference` or `patch`.
        number: of the slot, from 0.
        fingerprint: of the model.
        prefix_ids: token ids of the system prefix.
        ids: the chunk's token ids.
    """
    return Base(f"{kind}-{number}", after_prefix=True).key(fingerprint, prefix_ids, ids)


def filled_slots(
    store: KVStore,
    kind: SlotKind,
    slots: int,
    fingerprint: Fingerprint,
    prefix_ids: tuple[int, ...],
    ids: tuple[int, ...],
) -> list[Slot]:
    """Return the slots of a chunk that have an entry, by number; this does not count as a use.

    Reads headers only, except from a remote, which returns whole entries.

    Args:
        store: the store.
        kind: `variant`, `difference` or `patch`.
        slots: how many to try; evictions leave gaps.
        fingerprint: of the model.
        prefix_ids: token ids of the system prefix.
        ids: the chunk's token ids.
    """
    filled = []
    for number in range(slots):
        key = slot_key(kind, number, fingerprint, prefix_ids, ids)
        entry = store.open(store.address(key))
        if isinstance(entry, Miss):
            continue
        chunk = entry[1]
        if chunk.context is not None and chunk.n_tokens == len(ids):
            filled.append(Slot(number, key, chunk, chunk.context))
    return filled


def slot_to_write(filled: Sequence[Slot], context: Context, slots: int, worth: Callable[[Slot], float]) -> int:
    """Return the number of the slot to write a cache to.

    This is the slot with the same context, else the first free one, else the one with the least worth.

    Args:
        filled: from `filled_slots`.
        context: of the cache.
        slots: how many there are.
        worth: of a filled slot; the first of equals is replaced.
    """
    for slot in filled:
        if slot.context == context:
            return slot.number
    free = set(range(slots)) - {slot.number for slot in filled}
    return min(free) if free else min(filled, key=worth).number


def worth_by_use(filled: Sequence[Slot], uses: Callable[[Slot], float]) -> Callable[[Slot], float]:
    """Return a worth that replaces the least used of the five oldest slots, as KVCOMM does (arXiv 2510.12872).

    Args:
        filled: all filled slots of one chunk.
        uses: how often a slot was used.
    """
    oldest = {slot.number for slot in sorted(filled, key=lambda slot: slot.turn)[:OLDEST]}
    return lambda slot: uses(slot) if slot.number in oldest else float("inf")


def read_checked(store: KVStore, slot: Slot) -> ChunkKV | None:
    """Return a slot's entry with every block read and checked, or None if it is gone or damaged; counts as a use.

    A damaged entry is discarded: once it is combined with others, the damaged part could not be told.
    """
    chunk = store.get(slot.key)
    if not isinstance(chunk, ChunkKV) or chunk.context != slot.context or chunk.n_tokens != slot.chunk.n_tokens:
        return None
    return chunk if check_entry(store, slot.key, chunk) is None else None
