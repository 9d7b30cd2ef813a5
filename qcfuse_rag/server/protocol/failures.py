"""Errors of requests: their status, and their body in the format of OpenAI's API.

https://platform.openai.com/docs/guides/error-codes
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from qcfuse_rag.errors import Busy, Closed, InvalidSetting, PromptTooLong, QCFuseError, StoreError

LOG = logging.getLogger(__name__)

CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded", 500: "server_error"}
"""OpenAI's codes of errors that have none of their own, by status; others have the status's own words."""
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a request that failed: an HTTP status other than 200, what to tell the client, and OpenAI's words.

    `code` is the kind of fault, None for that of the status; `param` is the field at fault, None if there is none.
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the response."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        code = self.code or CODES.get(self.status) or HTTPStatus(self.status).phrase.lower().replace(" ", "_")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}

    @property
    def event(self) -> str:
        """The server-sent event that ends a stream."""
        return f"data: {json.dumps(self.body)}\n\n"


def unknown_model(name: str, served: str) -> Failure:
    """Return what to tell a client that asks for another model than the served one."""
    return Failure(404, f"no model {name!r} here; there is {served!r}", "model_not_found", "model")


def failure_of(error: Exception, prompt_field: str | None = None) -> Failure:
    """Return what to tell the client about an error; unexpected ones are logged. `prompt_field` holds the prompt."""
    match error:
        case Busy():
            return Failure(429, str(error))
        case Closed():
            return Failure(503, str(error))
        case PromptTooLong():
            return Failure(400, str(error), "context_length_exceeded", prompt_field)
        case InvalidSetting():
            return Failure(400, str(error), error.code, error.param)
        case StoreError():
            return Failure(500, str(error))
        case QCFuseError() | ValueError():
            return Failure(400, str(error), "invalid_value")
        case RecursionError():
            return Failure(400, "something in the body is nested too deeply", "invalid_value")
    LOG.error("a request failed", exc_info=error)
    return Failure(500, f"the server failed: {type(error).__name__}")
