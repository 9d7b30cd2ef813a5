"""Full prefill: reuse nothing. All other methods are measured against it."""

from __future__ import annotations

from qcfuse_rag.fusion.method import Choice, Method


def full() -> Method:
    """Compute every row, on the same ids and through the same code as all other methods."""
    return Method("full", base=None, choice=Choice("full prefill computes the whole prompt"))
