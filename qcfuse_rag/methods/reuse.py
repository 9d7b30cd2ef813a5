"""Full reuse, as in Prompt Cache (Gim et al., arXiv 2311.04934), with keys rotated to their positions."""

from __future__ import annotations

from qcfuse_rag.fusion.method import Choice, Method
from qcfuse_rag.store.key import FRAMED, Base


def reuse(base: Base = FRAMED) -> Method:
    """Recompute no passage token: the lowest cost, and the lowest quality on questions over several passages."""
    return Method("reuse", base=base, choice=Choice("the method recomputes nothing"))
