"""Group a job's chunks into batches of similar length, so that little padding is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from qcfuse_rag.ingestion.batch_prefill import Batch
from qcfuse_rag.ingestion.neighbour_table import NeighbourTable
from qcfuse_rag.ingestion.target import PendingChunk

Item = TypeVar("Item")

BATCHES_PER_GROUP = 32
FULL_ENOUGH = 4
"""A batch of 1 / FULL_ENOUGH of the token limit uses the device well: it takes no item that needs much padding."""
TOO_SHORT = 0.9
"""An item shorter than this share of the batch's longest item needs much padding."""
COPIES_PER_TOKEN = 4
"""Tokens of a primer that count as one token of a batch: their copies take memory, but are not computed."""


def plan_batches(
    work: Sequence[PendingChunk],
    *,
    batch_tokens: int,
    extra: int,
    primer_tokens: int = 0,
    table: NeighbourTable | None = None,
) -> Iterator[Batch]:
    """Yield batches of chunks, those of enriched bases last.

    Args:
        work: chunks to prefill, the most wanted first.
        batch_tokens: token limit of a batch.
        extra: tokens that every chunk needs besides its own, such as the ranking instruction.
        primer_tokens: tokens of the primer, which is copied in front of every chunk of a primed base.
        table: the neighbours of enriched chunks; None if there are none.
    """
    for base in sorted(dict.fromkeys(chunk.base for chunk in work), key=lambda base: base.enriched):
        groups: dict[int, list[PendingChunk]] = {}  # by the number of tokens in front, which a batch shares
        for chunk in work:
            if chunk.base is base:
                prefix_tokens = table.prefix_tokens(chunk) if table is not None and base.enriched else 0
                groups.setdefault(prefix_tokens, []).append(chunk)
        for prefix_tokens, group in groups.items():
            in_front = prefix_tokens + (primer_tokens // COPIES_PER_TOKEN if base.primed else 0)
            for batch in batches_by_length(
                group, lambda chunk: len(chunk.ids), batch_tokens=batch_tokens, extra=extra + in_front
            ):
                neighbours = tuple(map(table.of, batch)) if table is not None and base.enriched else ()
                yield Batch(base, tuple(tuple(chunk.ids) for chunk in batch), neighbours, prefix_tokens)


def batches_by_length(
    items: Sequence[Item], length: Callable[[Item], int], *, batch_tokens: int, extra: int = 0
) -> Iterator[list[Item]]:
    """Cut a sequence into batches of at most `batch_tokens` tokens, padding included.

    The order is kept roughly: items are sorted by length within groups of about 32 batches. The first items of the
    sequence are done first, and little padding is computed.

    Args:
        items: items in order of importance.
        length: returns the number of tokens of an item.
        batch_tokens: token limit of a batch; a longer item is a batch of its own.
        extra: tokens that every item needs besides its own.
    """
    buffered: list[Item] = []
    tokens = 0
    for item in items:
        buffered.append(item)
        tokens += length(item) + extra
        if tokens >= BATCHES_PER_GROUP * batch_tokens:
            yield from _cut(buffered, length, batch_tokens, extra)
            buffered, tokens = [], 0
    yield from _cut(buffered, length, batch_tokens, extra)


def _cut(buffered: list[Item], length: Callable[[Item], int], batch_tokens: int, extra: int) -> Iterator[list[Item]]:
    batch: list[Item] = []
    for item in sorted(buffered, key=length, reverse=True):  # the first item of a batch is its longest
        if batch:
            longest = length(batch[0])
            full = (len(batch) + 1) * (longest + extra) > batch_tokens
            enough = len(batch) * (longest + extra) >= batch_tokens // FULL_ENOUGH
            if full or (enough and length(item) < TOO_SHORT * longest):
                yield batch
                batch = []
        batch.append(item)
    if batch:
        yield batch
