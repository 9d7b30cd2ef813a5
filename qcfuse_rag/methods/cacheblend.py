"""CacheBlend (Yao et al., arXiv 2405.16444): recompute the tokens whose keys and values deviate most."""

from __future__ import annotations

from typing import Literal

from qcfuse_rag.errors import UnknownMethod
from qcfuse_rag.fuse.budget import FixedRatio
from qcfuse_rag.fuse.deviation import DeviationProbe
from qcfuse_rag.fuse.gradual import GradualFilter
from qcfuse_rag.fuse.method import Method
from qcfuse_rag.fuse.select import AllTokens, TopTokens
from qcfuse_rag.ingest.base import BLIND, Base


def cacheblend(
    ratio: float = 0.15, base: Base = BLIND, variant: Literal["paper", "release"] = "paper", layer: int = 1
) -> Method:
    """Recompute the tokens that differ most from what the prompt makes of them, whatever the question.

    Its loading controller is the budget `fuse.roofline.Roofline`, to be put in the place of the ratio.

    Args:
        ratio: share of the passage tokens to recompute; the released code's is 0.16.
        base: which stored caches to start from.
        variant: `paper` filters gradually: every token up to layer 1, then fewer in every layer. `release` is the
            published code: one comparison, of values only, and one set for all layers.
        layer: where deviation is first looked at; layer 0 never deviates.
    """
    if variant == "paper":
        return Method(
            "cacheblend", base, selector=AllTokens(), budget=FixedRatio(ratio), layerwise=GradualFilter(layer)
        )
    if variant == "release":
        probe = DeviationProbe(layer, "value")
        return Method("cacheblend", base, probe=probe, selector=TopTokens(), budget=FixedRatio(ratio))
    raise UnknownMethod(f"no variant {variant!r} of cacheblend; there are paper and release")
