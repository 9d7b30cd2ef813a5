"""Cache-Craft (Agarwal et al., arXiv 2502.15734): the cache from the closest context, mended where it looked."""

from __future__ import annotations

from qcfuse_rag.fuse.budget import FixedRatio
from qcfuse_rag.fuse.focus import FocusedChunks
from qcfuse_rag.fuse.inter import InterProbe
from qcfuse_rag.fuse.method import Method
from qcfuse_rag.fuse.select import TopOfEachChunk
from qcfuse_rag.fuse.variants import ClosestVariant
from qcfuse_rag.ingest.base import FRAMED, Base


def cachecraft(
    ratio: float | None = None,
    base: Base = FRAMED,
    alpha: float = 1.0,
    slots: int = 5,
    early_stop: bool | None = None,
) -> Method:
    """Recompute the tokens that looked at other passages when captured, as many as the change of context demands.

    Args:
        ratio: share of all passages' tokens, divided by demand; None recomputes what each passage demands, and a whole
            passage from a demand of 1 on, as published.
        base: stored caches beside those captured with `FusionEngine.capture`.
        alpha: demand per unit of context impact and change; the paper fits it to a quality target.
        slots: captured caches to try for each passage; the paper's example keeps 5.
        early_stop: after 0.4 of the layers mend only passages that the question looks at; if None, without a ratio.
    """
    published = ratio is None
    return Method(
        "cachecraft",
        base,
        adapter=ClosestVariant(alpha, slots, refuse=published),
        probe=InterProbe(),
        selector=TopOfEachChunk(by_demand=published),
        budget=None if ratio is None else FixedRatio(ratio),
        layerwise=FocusedChunks() if (published if early_stop is None else early_stop) else None,
    )
