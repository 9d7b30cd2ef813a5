"""AgentKVShift (arXiv 2607.21604): recompute a few tokens of each chunk, shift the others by what those moved."""

from __future__ import annotations

from qcfuse_rag.fuse.budget import FixedRatio
from qcfuse_rag.fuse.deviation import DeviationProbe
from qcfuse_rag.fuse.method import Method
from qcfuse_rag.fuse.select import TopOfEachChunk
from qcfuse_rag.fuse.shift import MeanShift
from qcfuse_rag.ingest.base import BLIND, Base


def agentkvshift(ratio: float = 0.1, base: Base = BLIND, keys: bool = True, values: bool = True) -> Method:
    """Recompute the tokens whose keys deviate most in layer 1, and add each chunk's mean residual to the others.

    Args:
        ratio: share of each chunk's tokens to recompute.
        base: which stored caches to start from.
        keys: shift keys.
        values: shift values.
    """
    return Method(
        "agentkvshift",
        base,
        probe=DeviationProbe(layer=1, measure="key"),
        selector=TopOfEachChunk(),
        budget=FixedRatio(ratio),
        layerwise=MeanShift(keys, values),
    )
