"""KVCOMM (arXiv 2510.12872): add the average of what other contexts changed, or compute where they disagree."""

from __future__ import annotations

from qcfuse_rag.fuse.budget import FixedRatio
from qcfuse_rag.fuse.method import Method
from qcfuse_rag.fuse.offsets import AnchorOffsets
from qcfuse_rag.fuse.probe import QuestionProbe
from qcfuse_rag.fuse.select import TopTokens
from qcfuse_rag.ingest.base import FRAMED


def kvcomm(ratio: float = 0.0, gamma: float = 0.3, temperature: float = 1.0, anchors: int = 20) -> Method:
    """Add stored differences to framed caches; `engine.capture(groups, keep=("difference",), variants=20)` makes them.

    Args:
        ratio: share of the passage tokens to recompute besides, those the question attends to most. The paper
            recomputes none; this is ours, and its probe ProphetKV's.
        gamma: share of the weights' greatest entropy above which a passage is computed in full.
        temperature: of the softmax over anchors.
        anchors: most differences to try for each passage.
    """
    return Method(
        "kvcomm",
        FRAMED,
        adapter=AnchorOffsets(gamma, temperature, anchors),
        probe=QuestionProbe(layers="all", anchor_ratio=1.0),
        selector=TopTokens(),
        budget=FixedRatio(ratio),
    )
