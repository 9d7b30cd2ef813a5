"""Iterate over a blocking iterator without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(source: Iterator[T]) -> AsyncIterator[T]:
    """Yield the items of `source`, each computed on a worker thread."""
    end: Any = object()
    while (item := await asyncio.to_thread(next, source, end)) is not end:
        yield item
