"""Wait for work while its client is connected, and encode long bodies beside the event loop."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeVar

from anyio import to_thread
from fastapi import Request
from fastapi.responses import Response

T = TypeVar("T")

DISCONNECT_POLL_S = 0.2
"""Seconds between two checks whether a waiting client is still connected."""

CLIENT_CLOSED = 499
"""Status of the response after the client has disconnected. Nobody receives it."""


async def wait_while_connected(work: asyncio.Future[T], request: Request) -> bool:
    """Wait until work is done; return False as soon as its client has gone."""
    while not work.done():
        await asyncio.wait({work}, timeout=DISCONNECT_POLL_S)
        if not work.done() and await request.is_disconnected():
            return False
    return True


async def long_json_response(body: dict[str, Any]) -> Response:
    """Return a response with a body of many numbers, encoded in a thread.

    `json.dumps` uses the C encoder, which holds the GIL until the end, so `/healthz` cannot answer. The Python encoder
    lets other threads run.
    """
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    content = await to_thread.run_sync(lambda: "".join(encoder.iterencode(body)).encode())
    return Response(content, media_type="application/json")
