"""Read JSON bodies in a thread, and refuse those that would keep Python parsing for long.

The parser holds Python's lock from a body's first value to its last, so meanwhile no health check is answered. Its time
depends on the number of values, not of bytes: 8 MiB of text take 10 ms, 8 MiB of `1,1,1` take seconds, and a minute if
each of them is a wrong type.
"""

from __future__ import annotations

import json
import re
from typing import TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

BodyT = TypeVar("BodyT", bound=BaseModel)

JSON_CONTENT = re.compile(r"application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE)

MAX_PARSING = 1
"""Requests whose bodies are parsed at a time; other requests wait as bytes. Two would wait for Python's lock anyway."""

PIECE_BYTES = 1 << 17
"""Bytes that are counted at a time, in about a millisecond; other threads run before the next ones."""

MAX_TOKENS = 50_000
"""Most strings, commas and opening brackets of a body; they bound the number of its values."""


class JsonBodies:
    """Reads the JSON bodies of requests, one at a time."""

    def __init__(self) -> None:
        self.threads = CapacityLimiter(MAX_PARSING)

    async def read(self, request: Request, kind: type[BodyT]) -> BodyT:
        """Return the body of a request as JSON of a type.

        Raises:
            RequestValidationError: if the body is not JSON or has fields of wrong types.
            HTTPException: if the content type is another one, or the body has too many values.
        """
        # A web page can send other types of content to this machine without asking.
        if not JSON_CONTENT.match(request.headers.get("content-type", "")):
            raise HTTPException(400, "the body has to be JSON, with the header Content-Type: application/json")
        pieces = [piece async for piece in request.stream()]

        def parse() -> BodyT:
            body = b"".join(pieces)
            pieces.clear()
            return parse_body(body, kind)

        return await to_thread.run_sync(parse, limiter=self.threads)


def parse_body(body: bytes, kind: type[BodyT]) -> BodyT:
    """Parse the body of a request as JSON of a type; raise the errors that FastAPI itself raises.

    Raises:
        RequestValidationError: if the body is not JSON or has fields of wrong types.
        HTTPException: if it has too many values, is nested too deeply, or cannot be decoded.
    """
    if count_tokens(body) > MAX_TOKENS:
        raise HTTPException(
            400, f"outside of its texts the body has more than {MAX_TOKENS:,} strings, commas and opening brackets"
        )
    try:
        return kind.model_validate(json.loads(body.decode("utf-8-sig")))
    except json.JSONDecodeError as error:
        detail = {"type": "json_invalid", "loc": ("body", error.pos), "ctx": {"error": error.msg}}
        raise RequestValidationError([detail]) from error
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_input=False)) from error
    except (RecursionError, ValueError) as error:  # nested too deeply, numbers too long, or not UTF-8
        raise HTTPException(400, f"the body cannot be read: {error}") from error


def count_tokens(body: bytes) -> int:
    """Count the strings, commas and opening brackets of JSON up to its first error, or until they are too many."""
    quotes = others = stop = 0
    while stop < len(body) and quotes // 2 + others <= MAX_TOKENS:
        start, stop = stop, stop + PIECE_BYTES
        while body[stop - 1 : stop] == b"\\":  # the next character belongs to it
            stop += 1
        texts = body[start:stop].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside_strings = texts[quotes % 2 :: 2]
        quotes += len(texts) - 1
        others += sum(text.count(character) for text in outside_strings for character in (b",", b"[", b"{"))
    return quotes // 2 + others
