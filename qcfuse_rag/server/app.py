"""The endpoint: `/v1/chat/completions`, `/v1/models`, `/healthz` and `/metrics`."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.server.auth_middleware import Guard, Limits
from qcfuse_rag.server.backend import Backend, Event
from qcfuse_rag.server.error_responses import error_body, failure
from qcfuse_rag.server.request import ChatRequest

LOOK_S = 0.2
"""Seconds between two looks whether a client who waits for an answer is still there."""

LOG = logging.getLogger(__name__)


def make_app(
    backend: Backend,
    *,
    token: str | None = None,
    limits: Limits | None = None,
    hosts: Collection[str] | None = None,
    metrics: Callable[[], bytes] | None = None,
    closing: Callable[[], None] = lambda: None,
) -> FastAPI:
    """Return the application.

    Args:
        backend: what answers.
        token: that clients give as `Authorization: Bearer ...`; None lets everybody ask.
        limits: of requests.
        hosts: names to be asked by where there is no token, see `Guard`; None takes any.
        metrics: returns metrics in Prometheus' text format; None has no `/metrics`.
        closing: called when the server has answered its last request.
    """
    bounds = limits or Limits()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(closing)

    app = FastAPI(title="qcfuse-rag", lifespan=lifespan, docs_url=None, redoc_url=None)

    app.add_middleware(Guard, token=token, limits=bounds, hosts=hosts)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        return failure(error.status_code, str(error.detail))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return failure(500, f"the server failed: {type(error).__name__}")

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        # Of a value that may be of several kinds, the error furthest inside is of the kind that was meant.
        told = max(error.errors(), key=lambda one: len(one["loc"]))
        if told["type"] == "json_invalid":
            return failure(400, f"the body is no JSON: {told['ctx']['error']} at character {told['loc'][-1]}")
        place = ".".join(str(part) for part in told["loc"] if part != "body")
        return failure(400, f"{place or 'the body'}: {told['msg']}")

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
        try:
            asked.refuse_unanswerable()
        except QCFuseError as error:
            return failure(400, str(error))
        events = backend.answer(asked)
        first = await first_of(events, request)
        if first is None:
            return Response(status_code=499)
        if first.error is not None:
            await events.aclose()  # type: ignore[attr-defined]
            return failure(first.status, first.error)
        about = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": backend.name}
        if asked.stream:
            return StreamingResponse(stream(first, events, about, asked), media_type="text/event-stream")
        return await whole(first, events, about, request)

    return app


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
