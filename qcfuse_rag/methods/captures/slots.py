"""Slots: the keys under which caches of one chunk in different contexts are stored, and the distance of contexts.

The context of such a cache cannot be part of its key: a reader does not know which contexts exist. Each chunk has a few
numbered slots instead, and a reader tries them all: `variant-0`, `variant-1`, ... for whole caches, `difference-0`, ...
for what a context adds to the framed cache, and `patch-0`, ... for that difference in low rank. The notes of each
entry name its context, so there is no index that could be lost or out of date.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from qcfuse_rag.fusion.state import PlacementContext
from qcfuse_rag.models.fingerprint import Fingerprint
from qcfuse_rag.prompts.segments import Segment
from qcfuse_rag.store.backends.base import KVStore, Miss, check_entry
from qcfuse_rag.store.chunk import KINDS, Blocks, ChunkKV
from qcfuse_rag.store.key import Base, ChunkKey
from qcfuse_rag.store.quantization import LOSSLESS

SlotKind = Literal["variant", "difference", "patch"]
Context = tuple[str, ...]
"""`hash_ids` of the chunks that a chunk was prefilled behind after the system prefix, in order."""

TURN = "turn"
"""Fact of a captured chunk: how many of its kind were captured of the same text before it."""

OLDEST = 5
HASH = re.compile(r"[0-9a-f]{32}")


def context_of(chunk: ChunkKV) -> Context | None:
    """Return the context that a chunk's notes name; None if they name none."""
    context = chunk.notes.get("context")
    if not isinstance(context, list) or not all(isinstance(name, str) and HASH.fullmatch(name) for name in context):
        return None
    return tuple(context)


def fact(chunk: ChunkKV, name: str) -> tuple[float, ...]:
    """Return the numbers that a chunk's notes have under a name, measured at its prefill; none if there are none."""
    facts: Any = chunk.notes.get("facts")
    numbers = facts.get(name) if isinstance(facts, dict) else None
    if not isinstance(numbers, list) or not all(type(x) in (int, float) and math.isfinite(x) for x in numbers):
        return ()
    return tuple(map(float, numbers))


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A slot with an entry, whose blocks are unread where the store allows it."""

    number: int
    key: ChunkKey
    chunk: ChunkKV
    context: Context

    @property
    def turn(self) -> float:
        """How many were captured before it; smaller is older."""
        return next(iter(fact(self.chunk, TURN)), 0.0)


def slot_key(
    kind: SlotKind, number: int, fingerprint: Fingerprint, prefix_ids: tuple[int, ...], ids: tuple[int, ...] | str
) -> ChunkKey:
    """Return the key of a chunk's slot, from 0."""
    return Base(f"{kind}-{number}", after_prefix=True).key(fingerprint, prefix_ids, ids)


def filled_slots(
    store: KVStore,
    kind: SlotKind,
    slots: int,
    fingerprint: Fingerprint,
    prefix_ids: tuple[int, ...],
    ids_hash: str,
    n_tokens: int,
) -> list[Slot]:
    """Return which of so many slots of a chunk have an entry, by number; evictions leave gaps.

    This does not count as a use. It reads headers only, except from a remote, which returns whole entries.
    """
    filled = []
    for number in range(slots):
        key = slot_key(kind, number, fingerprint, prefix_ids, ids_hash)
        entry = store.open(store.address(key))
        if isinstance(entry, Miss):
            continue
        chunk = entry[1]
        context = context_of(chunk)
        if context is not None and chunk.n_tokens == n_tokens:
            filled.append(Slot(number, key, chunk, context))
    return filled


def slots_at(context: PlacementContext, kind: SlotKind, slots: int) -> list[Slot]:
    """Return the filled slots of the chunk that stands at a place of a prompt; see `filled_slots`."""
    segment, prefix_ids = context.span.segment, context.prompt.prefix_ids
    n_tokens = len(segment.ids) if segment.part is None else segment.part.n_tokens
    return filled_slots(context.store, kind, slots, context.lm.fingerprint, prefix_ids, segment.ids_hash, n_tokens)


def predecessors(context: PlacementContext) -> Context:
    """Return the hashes of the chunks in front of a place of a prompt, in order."""
    return tuple(segment.ids_hash for segment in _chunks_before(context))


def follows_system_prefix(context: PlacementContext) -> bool:
    """Return whether only the system prefix and chunks stand before a place, as where slots are captured."""
    before = _chunks_before(context)
    ids = itertools.chain(context.prompt.prefix_ids, *(segment.ids for segment in before))
    return context.prompt.ids[: context.span.start] == tuple(ids) and not any(segment.is_cut for segment in before)


def _chunks_before(context: PlacementContext) -> list[Segment]:
    return [span.segment for span in context.prompt.chunks if span.stop <= context.span.start]


def slot_to_write(filled: Sequence[Slot], context: Context, slots: int, worth: Callable[[Slot], float]) -> int:
    """Return the number of the slot to write a cache to.

    This is the slot with the same context, else the first free one of `slots`, else the first with the least worth.
    """
    for slot in filled:
        if slot.context == context:
            return slot.number
    free = set(range(slots)) - {slot.number for slot in filled}
    return min(free) if free else min(filled, key=worth).number


def worth_by_use(filled: Sequence[Slot], uses: Callable[[Slot], float]) -> Callable[[Slot], float]:
    """Return a worth that replaces the least used of the five oldest slots, as KVCOMM does (arXiv 2510.12872)."""
    oldest = {slot.number for slot in sorted(filled, key=lambda slot: slot.turn)[:OLDEST]}
    return lambda slot: uses(slot) if slot.number in oldest else float("inf")


def read_checked(store: KVStore, slot: Slot) -> ChunkKV | None:
    """Return a slot's entry with every block read and checked, or None if it is gone or damaged; counts as a use.

    A damaged entry is discarded: once it is combined with others, the damaged part could not be told.
    """
    chunk = store.get(slot.key)
    if not isinstance(chunk, ChunkKV) or context_of(chunk) != slot.context or chunk.n_tokens != slot.chunk.n_tokens:
        return None
    return chunk if check_entry(store, slot.key, chunk) is None else None


# The context that a cache was prefilled in and that of a prompt. A chunk counts by the attention paid to it at prefill
# (the fact `inter`, see `attention`); where that was not measured, all count alike.


def attention_mass(slot: Slot) -> tuple[float, ...]:
    """Return the attention paid to each chunk of a slot's context, summed over the slot's tokens."""
    measured = fact(slot.chunk, "inter")
    if len(measured) == len(slot.context) and sum(measured) > 0:
        return tuple(max(0.0, mass) for mass in measured)
    return tuple(slot.chunk.n_tokens / max(1, len(slot.context)) for _ in slot.context)


def context_overlap(slot: Slot, now: Context) -> float:
    """Return the share of a slot's context, by attention, that `now` contains too; 1 for an empty context."""
    return shared_attention(slot.context, attention_mass(slot), now)


def shared_attention(then: Sequence[str], masses: Sequence[float], now: Sequence[str]) -> float:
    """Return the share of the attention to the chunks of `then` that went to chunks in `now`; 1 if there was none."""
    total = sum(masses)
    return sum(mass for chunk, mass in zip(then, masses, strict=True) if chunk in now) / total if total > 0 else 1.0


def kendall_distance(then: Sequence[str], now: Sequence[str]) -> float:
    """Return the share of pairs of common chunks whose order differs (Kendall's distance)."""
    common = [chunk for chunk in dict.fromkeys(then) if chunk in now]
    pairs = list(itertools.combinations(common, 2))
    swapped = sum(now.index(first) > now.index(second) for first, second in pairs)
    return swapped / len(pairs) if pairs else 0.0


def context_distance(slot: Slot, now: Context) -> float:
    """Return how far a slot's context is from another, in tokens' worth of attention; 0 for the same context.

    A chunk that is missing from `now` counts by the attention paid to it. A new chunk counts like an average chunk of
    the slot's context. A different order counts in proportion to the pairs swapped.
    """
    masses = attention_mass(slot)
    missing = sum(mass for chunk, mass in zip(slot.context, masses, strict=True) if chunk not in now)
    average = sum(masses) / len(masses) if masses else slot.chunk.n_tokens
    added = sum(chunk not in slot.context for chunk in now) * average
    return missing + added + kendall_distance(slot.context, now) * (sum(masses) - missing)


Weighted = tuple[float, ChunkKV]
"""The factor of a difference, and the difference."""


class SummedBlocks(Blocks):
    """Blocks of a cache, in the model's dtype, with differences added when they are read, from `first_layer` on.

    The cache and the differences are unrotated and in any format. Results are not kept.
    """

    def __init__(self, chunk: ChunkKV, differences: Sequence[Weighted], first_layer: int) -> None:
        self._chunk, self._differences, self._first_layer = chunk, differences, first_layer

    def __getitem__(self, name: str) -> Tensor:
        if name.partition(".")[0] not in KINDS:
            return self._chunk.blocks[name]
        return self.rows(name, 0, self._chunk.n_tokens)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of the sum, summed in float32 and rounded once."""
        kind, _, layer = name.partition(".")
        if kind not in KINDS:
            return self._chunk.blocks.rows(name, start, stop)
        block = self._chunk.part(kind, int(layer), start, stop)
        if int(layer) < self._first_layer:
            return block.transpose(0, 1)
        total = block.float()
        for weight, difference in self._differences:
            total = total + weight * difference.part(kind, int(layer), start, stop).to(block.device).float()
        return total.to(block.dtype).transpose(0, 1)


def add_differences(chunk: ChunkKV, differences: Sequence[Weighted], *, first_layer: int = 0) -> ChunkKV:
    """Return a cache with weighted differences added from a layer on, layer by layer as it is read."""
    return replace(chunk, kv_dtype=LOSSLESS, blocks=SummedBlocks(chunk, differences, first_layer))
