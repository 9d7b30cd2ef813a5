"""The HTTP application: `/v1/chat/completions`, `/v1/models`, `/v1/documents`, `/healthz` and `/metrics`."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.server.auth_middleware import AuthMiddleware, RequestLimits
from qcfuse_rag.server.backend import Backend, Event
from qcfuse_rag.server.documents import add_document_routes
from qcfuse_rag.server.error_responses import error_body, error_response
from qcfuse_rag.server.json_body import JsonBodies
from qcfuse_rag.server.request import ChatRequest

if TYPE_CHECKING:  # needs the extra `cli`
    from qcfuse_rag.server.library import ServedLibrary

DISCONNECT_POLL_S = 0.2
"""Seconds between two checks whether a waiting client is still connected."""

LOG = logging.getLogger(__name__)


def make_app(
    backend: Backend,
    *,
    token: str | None = None,
    limits: RequestLimits | None = None,
    hosts: Collection[str] | None = None,
    metrics: Callable[[], bytes] | None = None,
    library: ServedLibrary | None = None,
    on_shutdown: Callable[[], None] = lambda: None,
) -> FastAPI:
    """Return the application.

    Args:
        backend: answers the requests.
        token: that clients send as `Authorization: Bearer ...`; None admits every client.
        limits: of requests; the defaults if None.
        hosts: allowed host names if there is no token, see `AuthMiddleware`; None allows any.
        metrics: returns metrics in Prometheus' text format; None disables `/metrics`.
        library: whose documents clients may list, and change if it is editable; None refuses both.
        on_shutdown: called after the last request.
    """
    limits = limits or RequestLimits()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        gc.collect()
        gc.freeze()  # else every full collection walks model and libraries: a third of a second without health checks
        yield
        gc.unfreeze()
        await asyncio.to_thread(on_shutdown)

    app = FastAPI(title="qcfuse-rag", lifespan=lifespan, docs_url=None, redoc_url=None)

    bodies = JsonBodies()
    app.add_middleware(AuthMiddleware, token=token, limits=limits, hosts=hosts)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        return error_response(error.status_code, str(error.detail))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return error_response(500, f"the server failed: {type(error).__name__}")

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        # Where a field allows several types, the deepest error belongs to the type that the client meant.
        deepest = max(error.errors(), key=lambda detail: len(detail["loc"]))
        if deepest["type"] == "json_invalid":
            reason, position = deepest["ctx"]["error"], deepest["loc"][-1]
            return error_response(400, f"the body is not JSON: {reason} at character {position}")
        field = ".".join(str(part) for part in deepest["loc"] if part != "body")
        return error_response(400, f"{field or 'the body'}: {deepest['msg']}")

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
            return error_response(404, f"no model {name!r} here; there is {backend.name!r}")
        return JSONResponse({"id": backend.name, "object": "model", "owned_by": "qcfuse-rag"})

    if metrics is not None:

        @app.get("/metrics")
        async def exposition() -> Response:
            return Response(metrics(), media_type="text/plain; version=0.0.4")

    add_document_routes(app, library, read_body=bodies.read, most=limits.documents)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        chat_request = await bodies.read(request, ChatRequest)
        if chat_request.model and chat_request.model != backend.name:
            return error_response(404, f"no model {chat_request.model!r} here; there is {backend.name!r}")
        count = len(chat_request.given_documents or ())
        if count > limits.documents:
            return error_response(400, f"{count} documents, and at most {limits.documents} are allowed")
        try:
            await to_thread.run_sync(chat_request.refuse_unsupported, limiter=bodies.threads)
        except QCFuseError as error:
            return error_response(400, str(error))
        events = backend.answer(chat_request)
        first = await first_event(events, request)
        if first is None:
            return Response(status_code=499)
        if first.error is not None:
            await events.aclose()
            return error_response(first.status, first.error)
        header = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": backend.name}
        if chat_request.stream:
            return StreamingResponse(event_stream(first, events, header, chat_request), media_type="text/event-stream")
        return await json_response(first, events, header, request)

    return app


async def first_event(events: AsyncGenerator[Event, None], request: Request) -> Event | None:
    """Wait for the first event; if the client disconnects before it, cancel the request and return None."""
    waiting = asyncio.ensure_future(anext(events))
    try:
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=DISCONNECT_POLL_S)
            if not waiting.done() and await request.is_disconnected():
                return None
        return waiting.result()
    finally:
        if not waiting.done():
            waiting.cancel()
            await asyncio.wait({waiting})


async def json_response(
    first: Event, events: AsyncGenerator[Event, None], header: dict[str, Any], request: Request
) -> Response:
    """Collect all events and return the answer as one JSON body; cancel it if the client disconnects."""
    text, reasoning, event = first.text, first.reasoning, first
    try:
        async for event in events:
            text += event.text
            reasoning += event.reasoning
            if event.error is not None:
                return error_response(event.status, event.error)
            if await request.is_disconnected():
                return Response(status_code=499)
    finally:
        await events.aclose()
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if event.calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if event.calls:
        message["tool_calls"] = event.calls
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": event.finish_reason}
    body = {"object": "chat.completion", **header, "choices": [choice], "usage": event.usage, "fusion": event.report}
    extra = {"documents": first.documents, "explanation": event.explanation}
    return JSONResponse({**body, **{name: value for name, value in extra.items() if value is not None}})


async def event_stream(
    first: Event, events: AsyncGenerator[Event, None], header: dict[str, Any], chat_request: ChatRequest
) -> AsyncIterator[str]:
    """Yield server-sent events; a failure midway is an event too, and then no `[DONE]` follows."""

    def chunk(delta: dict[str, Any] | None, finish_reason: str | None = None, **fields: Any) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        choices = [] if delta is None else [choice]
        return f"data: {json.dumps({'object': 'chat.completion.chunk', **header, 'choices': choices, **fields})}\n\n"

    try:
        retrieved: dict[str, Any] = {} if first.documents is None else {"documents": first.documents}
        yield chunk({"role": "assistant", "content": first.text, **reasoning_of(first)}, **retrieved)
        event = first
        async for event in events:
            if event.error is not None:
                yield f"data: {json.dumps(error_body(event.status, event.error))}\n\n"
                return
            if event.text or event.reasoning:
                yield chunk({**({"content": event.text} if event.text else {}), **reasoning_of(event)})
        calls = [{"index": index, **call} for index, call in enumerate(event.calls)]
        yield chunk({"tool_calls": calls} if calls else {}, event.finish_reason)
        if chat_request.stream_options is not None and chat_request.stream_options.include_usage:
            yield chunk(None, usage=event.usage, fusion=event.report)
        if event.explanation is not None:
            yield chunk(None, explanation=event.explanation)
        yield "data: [DONE]\n\n"
    except Exception as error:
        LOG.exception("an answer failed midway")
        yield f"data: {json.dumps(error_body(500, f'the server failed: {type(error).__name__}'))}\n\n"
    finally:
        await events.aclose()


def reasoning_of(event: Event) -> dict[str, str]:
    """Return an event's reasoning as a field of a message; none if it has none."""
    return {"reasoning_content": event.reasoning} if event.reasoning else {}
