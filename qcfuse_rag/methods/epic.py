"""EPIC's LegoLink (Hu et al., arXiv 2410.15332): recompute the attention sink at the start of each chunk."""

from __future__ import annotations

from qcfuse_rag.fusion.budgets import FixedRatio
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.selectors import ChunkHeads
from qcfuse_rag.store.prefill_base import BEGUN, BLIND, Base


def epic(ratio: float | None = None, base: Base | None = None, n_tokens: int = 16) -> Method:
    """Recompute the first tokens of every chunk except a chunk at the start of the prompt, whatever the question.

    Args:
        ratio: share of each chunk, for comparison with other methods at equal cost; None for a fixed number of tokens.
        base: which stored caches to start from; the paper uses blind caches, and begun caches for LegoLink-0.
        n_tokens: LegoLink-k's k, used if `ratio` is None; the paper tries 2 to 32. 0 recomputes nothing.
    """
    if ratio is None:
        base = base or (BLIND if n_tokens else BEGUN)
        return Method("epic", base, selector=ChunkHeads(n_tokens), budget=None)
    return Method("epic", base or BLIND, selector=ChunkHeads(None), budget=FixedRatio(ratio))
