"""Responses of server-sent events, which proxies neither hold back nor end while the next event is awaited.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.responses import StreamingResponse

COMMENT_S = 5.0
"""Seconds without an event after which a comment is sent; proxies end a silent connection after 60 s or less."""

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""The second one keeps nginx from collecting events in a buffer."""


def event_response(events: AsyncGenerator[str, None]) -> StreamingResponse:
    """Return a response of events as text; its headers are sent at once, and it closes the events at its end."""
    return StreamingResponse(with_comments(events), headers=HEADERS, media_type="text/event-stream")


async def with_comments(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Yield the events, and a comment whenever none has come for `COMMENT_S`."""
    try:
        while True:
            awaited = asyncio.ensure_future(anext(events))
            try:
                while not (await asyncio.wait({awaited}, timeout=COMMENT_S))[0]:
                    yield ": waiting\n\n"
                event = awaited.result()
            except StopAsyncIteration:
                return
            finally:
                if awaited.cancel():
                    await asyncio.wait({awaited})
            yield event
    finally:
        await events.aclose()
