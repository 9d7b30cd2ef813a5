"""Group chunks of like length, so that little is computed for filling up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")

BATCHES_PER_WINDOW = 32
ENOUGH = 4
"""A batch of a quarter of the bound keeps the machine busy: it takes no item that would be filled up by much."""
TOO_SHORT = 0.9


def batches_by_length(
    items: Sequence[Item], length: Callable[[Item], int], *, batch_tokens: int, extra: int = 0
) -> Iterator[list[Item]]:
    """Cut a sequence into batches of at most `batch_tokens` tokens, filled-up places included.

    The order is kept roughly: items are sorted by length within windows of some 32 batches, so what comes first in the
    sequence is done first and what is computed in vain stays small.

    Args:
        items: in order of importance.
        length: tokens of an item.
        batch_tokens: bound of a batch; an item longer than that is a batch of its own.
        extra: tokens that every item takes besides.
    """
    window: list[Item] = []
    tokens = 0
    for item in items:
        window.append(item)
        tokens += length(item) + extra
        if tokens >= BATCHES_PER_WINDOW * batch_tokens:
            yield from _cut(window, length, batch_tokens, extra)
            window, tokens = [], 0
    yield from _cut(window, length, batch_tokens, extra)


def _cut(window: list[Item], length: Callable[[Item], int], batch_tokens: int, extra: int) -> Iterator[list[Item]]:
    batch: list[Item] = []
    for item in sorted(window, key=length, reverse=True):  # so that the first of a batch is its longest
        if batch:
            longest = length(batch[0])
            full = (len(batch) + 1) * (longest + extra) > batch_tokens
            enough = len(batch) * (longest + extra) >= batch_tokens // ENOUGH
            if full or (enough and length(item) < TOO_SHORT * longest):
                yield batch
                batch = []
        batch.append(item)
    if batch:
        yield batch
