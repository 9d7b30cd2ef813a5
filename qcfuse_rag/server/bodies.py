"""Read JSON bodies of requests, and write errors and long JSON bodies, beside the event loop."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from qcfuse_rag.errors import InvalidSetting
from qcfuse_rag.server.protocol.failures import Failure

T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=BaseModel)

JSON_CONTENT = re.compile(r"application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE)

MAX_PARSING = 1
"""Requests whose bodies are parsed at a time; other requests wait as bytes. Two would wait for Python's lock anyway."""

MAX_TOKENS = 50_000
"""Most strings, commas and opening brackets of a body; they bound the number of its values.

The parser holds Python's lock from a body's first value to its last, so meanwhile no health check is answered. Its time
depends on the number of values, not of bytes: 8 MiB of text take 10 ms, 8 MiB of `[1],[1]` seconds.
"""
TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[,\[{]', re.DOTALL)
"""Matches what is counted; a text with its escapes counts once."""

CLOSE = {"Connection": "close"}
HEADERS = {
    415: {"Accept-Encoding": "identity"},
    401: {"WWW-Authenticate": "Bearer"},
    408: CLOSE,
    429: {"Retry-After": "1"},
}
"""Extra response headers by status."""

UNION_TAG = re.compile(r"str|int|\[key\]|(list|literal)\[.*\]")
"""Matches what pydantic adds to the path of a value: the type of a union that it tried, or that a key is meant."""

PYDANTIC_CODES = {"missing": "missing_required_parameter", "unsupported": "unsupported_value"}
"""OpenAI's codes by pydantic's kinds of errors."""

DISCONNECT_POLL_S = 0.2
"""Seconds between two checks whether a waiting client is still connected."""


class JsonBodies:
    """Reads the JSON bodies of requests, one at a time."""

    def __init__(self) -> None:
        self.threads = CapacityLimiter(MAX_PARSING)

    async def read(self, request: Request, kind: type[BodyT]) -> BodyT:
        """Return the body of a request as JSON of a type.

        Raises:
            HTTPException: if the content type is another one.
            InvalidSetting: if the body is not JSON of this type.
        """
        # A web page can send other types of content to this machine without asking.
        if not JSON_CONTENT.match(request.headers.get("content-type", "")):
            raise HTTPException(400, "the body has to be JSON, with the header Content-Type: application/json")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise HTTPException(415, "the body is compressed; send it as it is, without Content-Encoding")
        pieces = [piece async for piece in request.stream()]

        def parse() -> BodyT:
            body = b"".join(pieces)
            pieces.clear()
            return parse_body(body, kind)

        return await to_thread.run_sync(parse, limiter=self.threads)


def parse_body(body: bytes, kind: type[BodyT]) -> BodyT:
    """Parse the body of a request as JSON of a type.

    Raises:
        InvalidSetting: if it is not JSON, has fields of wrong types, or too many values.
    """
    if next(islice(TOKEN.finditer(body), MAX_TOKENS, None), None) is not None:
        raise InvalidSetting(
            f"outside of its texts the body has more than {MAX_TOKENS:,} strings, commas and opening brackets"
        )
    try:
        return kind.model_validate_json(body.removeprefix(b"\xef\xbb\xbf"))
    except ValidationError as error:
        # Where a field allows several types, the deepest error belongs to the type that the client meant.
        deepest = max(error.errors(include_input=False, include_url=False), key=lambda detail: len(detail["loc"]))
        if deepest["type"] == "json_invalid":
            raise InvalidSetting(f"the body is not JSON: {deepest['ctx']['error']}", code="invalid_json") from error
        path = [str(part) for part in deepest["loc"] if not UNION_TAG.fullmatch(str(part))]
        field, fault = ".".join(path), deepest["type"]
        code = "invalid_type" if fault.endswith("_type") else PYDANTIC_CODES.get(fault, "invalid_value")
        raise InvalidSetting(f"{field or 'the body'}: {deepest['msg']}", field or None, code) from error


def error_response(failure: Failure, *, close: bool = False) -> Response:
    """Return an error response; close the connection where it is unclear where the next request on it would begin."""
    headers = HEADERS.get(failure.status, {}) | (CLOSE if close else {})
    return JSONResponse(failure.body, failure.status, headers)


async def wait_while_connected(work: asyncio.Future[T], request: Request, timeout_s: float = math.inf) -> None:
    """Wait until work is done, for some seconds at most; raise `ClientDisconnect` as soon as its client has gone."""
    deadline = time.monotonic() + timeout_s
    while not work.done() and time.monotonic() < deadline:
        await asyncio.wait({work}, timeout=DISCONNECT_POLL_S)
        if not work.done() and await request.is_disconnected():
            raise ClientDisconnect


async def run_while_connected(work: Callable[[Callable[[], bool]], T], request: Request, limiter: CapacityLimiter) -> T:
    """Return the result of work in a thread; the work may ask whether nobody waits for it any more."""
    gone = threading.Event()
    job = asyncio.ensure_future(to_thread.run_sync(work, gone.is_set, limiter=limiter))
    try:
        await wait_while_connected(job, request)
    finally:
        gone.set()
    return job.result()


async def long_json_response(body: dict[str, Any]) -> Response:
    """Return a response with a body of many numbers, encoded in a thread.

    `json.dumps` uses the C encoder, which holds the GIL until the end, so `/healthz` cannot answer. The Python encoder
    lets other threads run.
    """
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    content = await to_thread.run_sync(lambda: "".join(encoder.iterencode(body)).encode())
    return Response(content, media_type="application/json")
