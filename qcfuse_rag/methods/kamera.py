"""Kamera (arXiv 2606.23581): keep what a context changes as a patch of low rank; add it when the context returns."""

from __future__ import annotations

from dataclasses import dataclass

from qcfuse_rag.fusion.adapters import AdaptedChunk, PlacementContext, add_differences, follows_system_prefix
from qcfuse_rag.fusion.budgets import FixedRatio
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.probes import QuestionProbe
from qcfuse_rag.fusion.selectors import TopTokens
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.context_distance import context_overlap, kendall_distance
from qcfuse_rag.store.prefill_base import FRAMED
from qcfuse_rag.store.variant_slots import Slot, filled_slots, read_checked


@dataclass(frozen=True, slots=True)
class StoredPatches:
    """Add the stored patch whose context fits the chunks in front, if one fits well enough.

    A patch of another context does harm, so one is added only if enough of what its chunk looked at then is in front
    of it now. One patch serves all orders of its context; of several that fit alike the one with the fewest strangers
    in front is taken, then the one whose order agrees most. A whole difference serves as a patch too.

    Attributes:
        threshold: least overlap of contexts, by attention (see `store.context_distance`). The paper asks for a threshold and
            gives none: this number is ours.
        slots: patches to try for each chunk.
    """

    threshold: float = 0.5
    slots: int = 5

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0 or self.slots < 1:
            raise ValueError(f"threshold must be a fraction and slots above 0, got {self.threshold} and {self.slots}")

    def adapt(self, place: PlacementContext, found: ChunkKV | Miss) -> AdaptedChunk | Miss:
        """Patch what was found; leave it as it is if it is exact, or if no patch fits."""
        if isinstance(found, Miss):
            return found
        if place.base.exact_behind(place.prompt.ids[: place.span.start], place.prompt.prefix_ids):
            return AdaptedChunk(found, exact=True)
        if not follows_system_prefix(place):
            return AdaptedChunk(found, note="no patch is for what stands in front")
        best = 0.0
        for fit, slot in self._ranked(place):
            best = max(best, fit)
            if fit < self.threshold:
                break
            patch = read_checked(place.store, slot)
            if patch is not None:
                exact = slot.key.base.startswith("difference") and slot.context == place.predecessors
                note = f"{slot.key.base}, overlap {fit:.2f}"
                return AdaptedChunk(add_differences(found, [(1.0, patch)]), exact, note=note)
        return AdaptedChunk(found, note=f"no patch fits, best overlap {best:.2f}")

    def _ranked(self, place: PlacementContext) -> list[tuple[float, Slot]]:
        """Return patches with their overlap, the best first; the same difference whole before its approximation."""
        now, where = place.predecessors, (place.lm.fingerprint, place.prompt.prefix_ids, place.span.segment.stored_ids)
        slots = [
            slot for kind in ("difference", "patch") for slot in filled_slots(place.store, kind, self.slots, *where)
        ]
        rated = [(context_overlap(slot, now), slot) for slot in slots]

        def order(one: tuple[float, Slot]) -> tuple[float, int, float]:
            fit, slot = one
            strangers = len(set(now) - set(slot.context)) + len(set(slot.context) - set(now))
            return -fit, strangers, kendall_distance(slot.context, now)

        return sorted(rated, key=order)


def kamera(ratio: float = 0.0, threshold: float = 0.5, slots: int = 5) -> Method:
    """Add stored patches to framed caches; `engine.corpus.capture(groups, keep=("patch",), rank=32)` makes them.

    Args:
        ratio: share of the passage tokens to recompute besides, those the question attends to most. The paper
            recomputes none; this is ours, and its probe ProphetKV's.
        threshold: least overlap of a patch's context with the passages in front; ours, the paper gives none.
        slots: patches to try for each passage.
    """
    return Method(
        "kamera",
        FRAMED,
        adapter=StoredPatches(threshold, slots),
        probe=QuestionProbe(layers="all", anchor_ratio=1.0),
        selector=TopTokens(),
        budget=FixedRatio(ratio),
    )
