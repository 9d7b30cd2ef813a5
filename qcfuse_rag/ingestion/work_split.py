"""Split a job's chunks: to prefill, stored already, without room in the store, or impossible to store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from qcfuse_rag.ingestion.neighbour_table import NeighbourTable
from qcfuse_rag.ingestion.target import PendingChunk, PrefillTarget

REFRESH_ABOVE = 0.5
"""A stored enriched chunk is prefilled again if it was made without more than this share of its neighbours."""


@dataclass(slots=True)
class WorkSplit:
    """A job's chunks by what happens to them; `WarmSummary` explains the counts."""

    work: list[PendingChunk] = field(default_factory=list)
    present: int = 0
    left_out: int = 0
    refreshed: int = 0
    stalest: float = 0.0
    failed: dict[int, str] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Number of tokens to prefill."""
        return sum(len(chunk.ids) for chunk in self.work)


def split_work(
    pending: Iterable[PendingChunk],
    target: PrefillTarget,
    limit_bytes: int | None,
    table: NeighbourTable | None = None,
) -> WorkSplit:
    """Split the chunks of a job.

    Args:
        pending: the chunks, the most wanted first.
        target: the model and the store.
        limit_bytes: largest size of the store in bytes, or None.
        table: the neighbours of enriched chunks; None if there are none.
    """
    split, size = WorkSplit(), target.entry_bytes(len(target.prefix_ids))
    context_tokens = target.lm.context_window.tokens
    for chunk in pending:
        length = len(chunk.ids) + (len(target.prefix_ids) if chunk.base.after_prefix else 0)
        length += len(target.primer) if chunk.base.primed else 0
        entry_size = target.entry_bytes(len(chunk.ids))
        size += entry_size
        if chunk.key in target.store:
            staleness = table.staleness(chunk) if table is not None and chunk.base.enriched else 0.0
            if staleness > REFRESH_ABOVE:
                split.refreshed += 1
                split.work.append(chunk)
            else:
                split.present += 1
                split.stalest = max(split.stalest, staleness)
        elif length > context_tokens:
            if not chunk.base.primed:  # a primed cache is not made then, and the framed one is used in its place
                split.failed.setdefault(chunk.index, _too_long(length, context_tokens))  # once for all bases
            size -= entry_size
        elif limit_bytes is not None and size > limit_bytes:
            split.left_out += 1
            size -= entry_size
        else:
            split.work.append(chunk)
    return split


def _too_long(length: int, context_tokens: int) -> str:
    return (
        f"a passage of {length:,} tokens with the system prefix exceeds the context window of {context_tokens:,}; "
        "split the document into smaller passages"
    )
