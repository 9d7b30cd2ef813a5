"""Kamera (arXiv 2606.23581): store what a context changes as a low-rank patch; add it in the same context."""

from __future__ import annotations

from dataclasses import dataclass

from qcfuse_rag.fusion.method import BY_ATTENTION, FixedRatio, Method
from qcfuse_rag.fusion.probes import QuestionProbe
from qcfuse_rag.fusion.selectors import TopTokens
from qcfuse_rag.fusion.state import AdaptedChunk, PlacementContext
from qcfuse_rag.methods.captures.slots import (
    Slot,
    add_differences,
    context_overlap,
    follows_system_prefix,
    kendall_distance,
    predecessors,
    read_checked,
    slots_at,
)
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import FRAMED


@dataclass(frozen=True, slots=True)
class StoredPatches:
    """Add the stored patch whose context overlaps most with the preceding chunks, if it overlaps enough.

    A patch of another context does harm. So a patch is added only if enough of what its chunk attended to at capture
    precedes the chunk now. One patch serves all orders of its context. Ties go to the patch with the fewest chunks
    that are in only one of the two contexts, then to the closest order. A whole difference serves as a patch too.
    """

    threshold: float = 0.5
    slots: int = 5

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0 or self.slots < 1:
            raise ValueError(f"threshold must be a fraction and slots above 0, got {self.threshold} and {self.slots}")

    def adapt(self, context: PlacementContext, stored: ChunkKV | Miss) -> AdaptedChunk | Miss:
        """Return the chunk with the best patch added; without one if the chunk is exact or no patch fits."""
        if isinstance(stored, Miss):
            return stored
        if context.exact_under(context.base):
            return AdaptedChunk(stored, exact=True)
        if not follows_system_prefix(context):
            return AdaptedChunk(stored, note="no patch applies, since text other than passages precedes the chunk")
        best = 0.0
        for overlap, slot in self._ranked(context):
            best = max(best, overlap)
            if overlap < self.threshold:
                break
            patch = read_checked(context.store, slot)
            if patch is not None:
                exact = slot.key.base.startswith("difference") and slot.context == predecessors(context)
                note = f"{slot.key.base}, overlap {overlap:.2f}"
                return AdaptedChunk(add_differences(stored, [(1.0, patch)]), exact, note=note)
        return AdaptedChunk(stored, note=f"no patch fits, best overlap {best:.2f}")

    def _ranked(self, context: PlacementContext) -> list[tuple[float, Slot]]:
        """Return patches with their overlap, the best first; a whole difference before its low-rank patch."""
        now = predecessors(context)
        slots = slots_at(context, "difference", self.slots) + slots_at(context, "patch", self.slots)
        rated = [(context_overlap(slot, now), slot) for slot in slots]

        def order(rating: tuple[float, Slot]) -> tuple[float, int, float]:
            overlap, slot = rating
            return -overlap, len(set(now) ^ set(slot.context)), kendall_distance(slot.context, now)

        return sorted(rated, key=order)


def kamera(ratio: float = 0.0, threshold: float = 0.5, slots: int = 5) -> Method:
    """Add stored patches to framed caches; `capture(writer, groups, keep=("patch",))` makes them.

    Args:
        ratio: share of the passage tokens to recompute in addition, chosen by ProphetKV's probe. This is ours; the
            paper recomputes none.
        threshold: least overlap of a patch's context with the preceding passages; ours, the paper gives no value.
        slots: number of patches to try for each passage.
    """
    return Method(
        "kamera",
        FRAMED,
        choice=BY_ATTENTION,
        adapter=StoredPatches(threshold, slots),
        probe=QuestionProbe(layers="all", anchor_ratio=1.0),
        selector=TopTokens(),
        budget=FixedRatio(ratio),
    )
