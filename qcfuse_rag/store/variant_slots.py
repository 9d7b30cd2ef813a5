"""Slots: under which keys the caches of one chunk that were born in different contexts are kept.

Such a cache cannot have its context in its key: whoever looks for one does not know which contexts there are. So each
chunk has a few numbered slots, `variant-0`, `variant-1`, ... for whole caches, `difference-0`, ... for what a context
adds to the framed cache and `patch-0`, ... for that in low rank, and looking means trying them. There is no index
that could be lost or stale; what a slot holds, its header says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.models.fingerprint import Fingerprint
from qcfuse_rag.store.backends.base import KVStore, Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.prefill_base import Base
from qcfuse_rag.store.provenance import Context

Kind = Literal["variant", "difference", "patch"]

TURN = "turn"
"""Fact of a captured chunk: how many of its kind were captured of the same text before it."""

OLDEST = 5


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A slot that holds something.

    Attributes:
        number: of the slot.
        key: of its entry.
        chunk: what it holds, its blocks unread as far as the store can leave them so.
        context: the chunks it was born behind, see `ChunkKV.context`.
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
    kind: Kind, number: int, fingerprint: Fingerprint, prefix_ids: tuple[int, ...], ids: tuple[int, ...]
) -> ChunkKey:
    """Return the key of a chunk's slot.

    Args:
        kind: `variant`, `difference` or `patch`.
        number: of the slot, from 0.
        fingerprint: the model.
        prefix_ids: token ids of the prompt's fixed head.
        ids: the chunk's token ids.
    """
    return Base(f"{kind}-{number}", after_prefix=True).key(fingerprint, prefix_ids, ids)


def filled_slots(
    store: KVStore, kind: Kind, slots: int, fingerprint: Fingerprint, prefix_ids: tuple[int, ...], ids: tuple[int, ...]
) -> list[Slot]:
    """Return the slots of a chunk that hold something, in order of their numbers.

    Reads headers only, unless the store is a remote, which hands out whole entries; looking is not counted as a use.

    Args:
        store: where to look.
        kind: `variant`, `difference` or `patch`.
        slots: how many to try; evictions leave gaps.
        fingerprint: the model.
        prefix_ids: token ids of the prompt's fixed head.
        ids: the chunk's token ids.
    """
    found = []
    for number in range(slots):
        key = slot_key(kind, number, fingerprint, prefix_ids, ids)
        opened = store.open(store.address(key))
        if isinstance(opened, Miss):
            continue
        chunk = opened[1]
        if chunk.context is not None and chunk.n_tokens == len(ids):
            found.append(Slot(number, key, chunk, chunk.context))
    return found


def slot_to_write(found: Sequence[Slot], context: Context, slots: int, worth: Callable[[Slot], float]) -> int:
    """Return the number of the slot in which to keep what was born in a context.

    That is the slot which holds the same context already, else the first free one, else the one worth least.

    Args:
        found: from `filled_slots`.
        context: of what is to be kept.
        slots: how many there are.
        worth: of what a slot holds; the first of equals gives way.
    """
    for slot in found:
        if slot.context == context:
            return slot.number
    free = set(range(slots)) - {slot.number for slot in found}
    return min(free) if free else min(found, key=worth).number


def worth_by_use(found: Sequence[Slot], uses: Callable[[Slot], float]) -> Callable[[Slot], float]:
    """Return a worth by which the least used of the five oldest gives way, as in KVCOMM (arXiv 2510.12872).

    Args:
        found: all slots of one chunk.
        uses: how often a slot was used.
    """
    oldest = {slot.number for slot in sorted(found, key=lambda slot: slot.turn)[:OLDEST]}
    return lambda slot: uses(slot) if slot.number in oldest else float("inf")


def read_checked(store: KVStore, slot: Slot) -> ChunkKV | None:
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
