"""The endpoint: `/v1/chat/completions`, `/v1/models`, `/healthz` and `/metrics`."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from qcfuse_rag.serve.backend import Backend, Event
from qcfuse_rag.serve.request import ChatRequest

RETRY_AFTER_S = 1
LOOK_S = 0.2
"""Seconds between two looks whether a client who waits for an answer is still there."""
OPEN = ("/healthz",)
"""Paths that need no token: they say nothing of what is served."""

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may be.

    Attributes:
        body_bytes: most bytes of a body.
        documents: most documents.
    """

    body_bytes: int = 8 << 20
    documents: int = 256


def make_app(
    backend: Backend,
    *,
    token: str | None = None,
    limits: Limits | None = None,
    metrics: Callable[[], bytes] | None = None,
    closing: Callable[[], None] = lambda: None,
) -> FastAPI:
    """Return the application.

    Args:
        backend: what answers.
        token: that clients give as `Authorization: Bearer ...`; None lets everybody ask.
        limits: of requests.
        metrics: returns metrics in Prometheus' text format; None has no `/metrics`.
        closing: called when the server has answered its last request.
    """
    bounds = limits or Limits()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(closing)

    app = FastAPI(title="qcfuse-rag", lifespan=lifespan, docs_url=None, redoc_url=None)

    app.add_middleware(Guard, token=token, limits=bounds)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        return failure(error.status_code, str(error.detail))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return failure(500, f"the server failed: {type(error).__name__}")

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return failure(400, f"{'.'.join(str(part) for part in first['loc'] if part != 'body')}: {first['msg']}")

    @app.api_route("/healthz", methods=["GET", "HEAD"])
    async def healthz() -> Response:
        reason = backend.ready()
        return JSONResponse({"status": "ok" if reason is None else reason}, 200 if reason is None else 503)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": backend.name, "object": "model", "owned_by": "qcfuse-rag"}]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != backend.name:
            return failure(404, f"no model {name!r} here; there is {backend.name!r}")
        return JSONResponse({"id": backend.name, "object": "model", "owned_by": "qcfuse-rag"})

    if metrics is not None:

        @app.get("/metrics")
        async def exposition() -> Response:
            return Response(metrics(), media_type="text/plain; version=0.0.4")

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        if asked.model and asked.model != backend.name:
            return failure(404, f"no model {asked.model!r} here; there is {backend.name!r}")
        if len(asked.documents or ()) > bounds.documents:
            return failure(400, f"{len(asked.documents or ())} documents, and at most {bounds.documents} are taken")
        events = backend.answer(asked)
        first = await first_of(events, request)
        if first is None:
            return Response(status_code=499)
        if first.error is not None:
            return failure(first.status, first.error)
        about = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": backend.name}
        if asked.stream:
            return StreamingResponse(stream(first, events, about, asked), media_type="text/event-stream")
        return await whole(first, events, about, request)

    return app


class Guard:
    """Lets in who has the token, with bodies that are not too large; says so before anything of a body is read.

    Args:
        app: what is behind it.
        token: None lets everybody in.
        limits: of requests.
    """

    def __init__(self, app: ASGIApp, token: str | None, limits: Limits) -> None:
        self._app, self._token, self._limits = app, token, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = dict(scope["headers"])
        if self._token is not None and scope["path"] not in OPEN:
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            if kind.lower() != b"bearer" or not secrets.compare_digest(given, self._token.encode()):
                return failure(401, "a bearer token is needed, and this is not it")
        length = headers.get(b"content-length", b"")
        if scope["method"] == "POST" and not length.isdigit():
            return failure(411, "say the body's length in Content-Length")
        most = self._limits.body_bytes
        if length.isdigit() and int(length) > most:
            return failure(413, f"the body has {int(length)} bytes, and this server reads at most {most}")
        return None


async def first_of(events: AsyncIterator[Event], request: Request) -> Event | None:
    """Wait for the first event; None if the client has gone by then, and the request is cancelled."""
    waiting = asyncio.ensure_future(anext(events))
    try:
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=LOOK_S)
            if not waiting.done() and await request.is_disconnected():
                return None
        return waiting.result()
    finally:
        if not waiting.done():
            waiting.cancel()
            await asyncio.wait({waiting})


async def whole(first: Event, events: AsyncIterator[Event], about: dict[str, Any], request: Request) -> Response:
    """Return the answer at once; a client who has gone cancels it."""
    text, event = first.text, first
    try:
        async for event in events:
            text += event.text
            if event.error is not None:
                return failure(event.status, event.error)
            if await request.is_disconnected():
                return Response(status_code=499)
    finally:
        await events.aclose()  # type: ignore[attr-defined]
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if event.calls else "")}
    if event.calls:
        message["tool_calls"] = event.calls
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": event.finish}
    body = {"object": "chat.completion", **about, "choices": [choice], "usage": event.usage, "fusion": event.report}
    return JSONResponse(body)


async def stream(
    first: Event, events: AsyncIterator[Event], about: dict[str, Any], asked: ChatRequest
) -> AsyncIterator[str]:
    """Yield server-sent events; what fails midway is one too, and then no `[DONE]` follows."""

    def chunk(delta: dict[str, Any] | None, finish: str | None = None, **more: Any) -> str:
        choices = [] if delta is None else [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
        return f"data: {json.dumps({'object': 'chat.completion.chunk', **about, 'choices': choices, **more})}\n\n"

    try:
        yield chunk({"role": "assistant", "content": first.text})
        event = first
        async for event in events:
            if event.error is not None:
                yield f"data: {json.dumps(error_body(event.status, event.error))}\n\n"
                return
            if event.text:
                yield chunk({"content": event.text})
        calls = [{"index": index, **call} for index, call in enumerate(event.calls)]
        yield chunk({"tool_calls": calls} if calls else {}, event.finish)
        if asked.stream_options is not None and asked.stream_options.include_usage:
            yield chunk(None, usage=event.usage, fusion=event.report)
        yield "data: [DONE]\n\n"
    except Exception as error:
        LOG.exception("an answer failed midway")
        yield f"data: {json.dumps(error_body(500, f'the server failed: {type(error).__name__}'))}\n\n"
    finally:
        await events.aclose()  # type: ignore[attr-defined]


def failure(status: int, message: str) -> Response:
    """Return an error as OpenAI's clients read it."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 429 else {}
    if status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    return JSONResponse(error_body(status, message), status, headers)


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
