"""Errors as OpenAI's clients read them."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse, Response

CLOSE = {"Connection": "close"}
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 408: CLOSE, 429: {"Retry-After": "1"}}
"""What else is said with a status."""


def failure(status: int, message: str, *, close: bool = False) -> Response:
    """Return an error as a response.

    Args:
        status: of HTTP.
        message: what is wrong, for people.
        close: the connection, since it is not known where another request on it would begin.
    """
    return JSONResponse(error_body(status, message), status, HEADERS.get(status, {}) | (CLOSE if close else {}))


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
