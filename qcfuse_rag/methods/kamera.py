"""Kamera (arXiv 2606.23581): keep what a context changes as a patch of low rank; add it when the context returns."""

from __future__ import annotations

from qcfuse_rag.fuse.budget import FixedRatio
from qcfuse_rag.fuse.method import Method
from qcfuse_rag.fuse.patches import StoredPatches
from qcfuse_rag.fuse.probe import QuestionProbe
from qcfuse_rag.fuse.select import TopTokens
from qcfuse_rag.ingest.base import FRAMED


def kamera(ratio: float = 0.0, threshold: float = 0.5, slots: int = 5) -> Method:
    """Add stored patches to framed caches; `engine.capture(groups, keep=("patch",), rank=32)` makes them.

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
