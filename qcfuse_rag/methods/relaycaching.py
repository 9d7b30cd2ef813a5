"""RelayCaching (Geng et al., arXiv 2603.13289): reuse what was computed while a text was generated."""

from __future__ import annotations

from qcfuse_rag.fuse.budget import FixedRatio
from qcfuse_rag.fuse.method import Method
from qcfuse_rag.fuse.relay import GeneratedFirst, RelayRepair
from qcfuse_rag.fuse.relay_layers import RelayLayers
from qcfuse_rag.fuse.select import AllTokens
from qcfuse_rag.ingest.base import FRAMED, Base


def relaycaching(
    ratio: float | None = None,
    base: Base = FRAMED,
    layers: RelayLayers | None = None,
    deviation: float = 1.5,
    influence: float = 1.45,
    suffix: int = 10,
) -> Method:
    """Recompute generated text in the middle layers, at the tokens that deviate or that the question's end looks at.

    Args:
        ratio: share of the tokens to choose, recomputed in all layers; None for the published thresholds and layers.
        base: which stored caches stand in for chunks that were not kept with `FusionEngine.put_generated`.
        layers: where to begin, choose and end; from `fuse.relay_layers.calibrate`, or by depth if None.
        deviation: choose tokens whose values deviate so many times the mean.
        influence: choose tokens looked at so many times the mean.
        suffix: how many tokens at the end of the prompt look.
    """
    repair = RelayRepair(layers, deviation, influence, suffix, fixed=ratio is not None)
    budget = None if ratio is None else FixedRatio(ratio)
    return Method("relaycaching", base, GeneratedFirst(), selector=AllTokens(), budget=budget, layerwise=repair)
