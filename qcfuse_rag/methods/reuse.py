"""Full reuse, as in Prompt Cache (Gim et al., arXiv 2311.04934), with keys moved to their place."""

from __future__ import annotations

from qcfuse_rag.fusion.method import Method
from qcfuse_rag.store.prefill_base import FRAMED, Base


def reuse(base: Base = FRAMED) -> Method:
    """Recompute no passage token: the floor of cost, and on questions over several passages of quality."""
    return Method("reuse", base=base)
