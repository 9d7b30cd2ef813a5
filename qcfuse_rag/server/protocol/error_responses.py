"""Error responses in the format of OpenAI's API."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse, Response

CLOSE = {"Connection": "close"}
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 408: CLOSE, 429: {"Retry-After": "1"}}
"""Extra response headers by status."""


def error_response(status: int, message: str, *, close: bool = False) -> Response:
    """Return an error response for people to read.

    Close the connection where it is unclear where the next request on it would begin.
    """
    return JSONResponse(error_body(status, message), status, HEADERS.get(status, {}) | (CLOSE if close else {}))


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return the JSON body of an error."""
    types = {401: "authentication_error", 429: "rate_limit_error"}
    error_type = types.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": error_type, "param": None, "code": status}}
