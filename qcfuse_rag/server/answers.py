"""`POST /v1/chat/completions` and `POST /v1/completions`: the routes that answer."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from qcfuse_rag.server.backend import Backend
from qcfuse_rag.server.bodies import (
    CLIENT_CLOSED,
    JsonBodies,
    error_body,
    error_response,
    long_json_response,
    wait_while_connected,
)
from qcfuse_rag.server.protocol.chat_request import ChatRequest
from qcfuse_rag.server.protocol.events import (
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    Event,
    Failure,
    LastPiece,
    Piece,
)
from qcfuse_rag.server.protocol.generation_request import CompletionRequest, GenerationRequest

LOG = logging.getLogger(__name__)


def answer_routes(backend: Backend, bodies: JsonBodies, max_documents: int) -> list[Route]:
    """Return the two routes."""

    async def chat(request: Request) -> Response:
        chat_request = await bodies.read(request, ChatRequest)
        count = len(chat_request.given_documents or ())
        if count > max_documents:
            return error_response(400, f"{count} documents, and at most {max_documents} are allowed")
        return await respond(request, chat_request, ChatFormat())

    async def complete(request: Request) -> Response:
        return await respond(request, await bodies.read(request, CompletionRequest), CompletionFormat())

    async def respond(request: Request, generation_request: GenerationRequest, answer_format: AnswerFormat) -> Response:
        if generation_request.model and generation_request.model != backend.name:
            return error_response(404, f"no model {generation_request.model!r} here; there is {backend.name!r}")
        await to_thread.run_sync(generation_request.refuse_unsupported, limiter=bodies.threads)
        events = backend.answer(generation_request)
        first = await wait_for_event(events, request)
        if first is None:
            return Response(status_code=CLIENT_CLOSED)
        if isinstance(first, Failure):
            await events.aclose()
            return error_response(first.status, first.message)
        header = {
            "id": f"{answer_format.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": backend.name,
        }
        if generation_request.stream:
            usage = generation_request.stream_options is not None and generation_request.stream_options.include_usage
            stream = event_stream(first, events, answer_format, header, usage=usage)
            return StreamingResponse(stream, media_type="text/event-stream")
        return await json_response(first, events, answer_format, header, request)

    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
    ]


async def wait_for_event(events: AsyncGenerator[Event, None], request: Request) -> Event | None:
    """Wait for the next event; if the client disconnects before it, cancel the request and return None.

    Raises:
        StopAsyncIteration: if there is no further event.
    """
    waiting = asyncio.ensure_future(anext(events))
    try:
        return waiting.result() if await wait_while_connected(waiting, request) else None
    finally:
        if not waiting.done():
            waiting.cancel()
            await asyncio.wait({waiting})


async def json_response(
    first: Piece,
    events: AsyncGenerator[Event, None],
    answer_format: AnswerFormat,
    header: dict[str, Any],
    request: Request,
) -> Response:
    """Collect all events and return the answers as one JSON body; cancel them if the client disconnects."""
    answers, last = [[first]], first
    try:
        while True:
            try:
                event = await wait_for_event(events, request)
            except StopAsyncIteration:
                break
            if isinstance(event, Failure):
                return error_response(event.status, event.message)
            if event is None or await request.is_disconnected():
                return Response(status_code=CLIENT_CLOSED)
            if event.index == len(answers):
                answers.append([])
            answers[event.index].append(event)
            last = event
    finally:
        await events.aclose()
    assert isinstance(last, LastPiece)
    choices = [answer_format.whole(answer) for answer in answers]
    body = {"object": answer_format.kind, **header, "choices": choices, "usage": last.usage, "fusion": last.report}
    extra = {"documents": first.documents, "explanation": last.explanation}
    body |= {name: value for name, value in extra.items() if value is not None}
    return JSONResponse(body) if last.logprobs is None else await long_json_response(body)


async def event_stream(
    first: Piece,
    events: AsyncGenerator[Event, None],
    answer_format: AnswerFormat,
    header: dict[str, Any],
    *,
    usage: bool,
) -> AsyncIterator[str]:
    """Yield server-sent events; a failure midway is an event too, and then no `[DONE]` follows.

    With `usage` they end with the usage of the request and the report; the field is null before that.
    """
    no_usage = {"usage": None} if usage else {}

    def chunk(choices: list[dict[str, Any]], **fields: Any) -> str:
        body = {"object": answer_format.chunk_kind, **header, "choices": choices, **no_usage, **fields}
        return f"data: {json.dumps(body)}\n\n"

    try:
        retrieved: dict[str, Any] = {} if first.documents is None else {"documents": first.documents}
        for choice in answer_format.parts(first):
            yield chunk([choice], **retrieved)
            retrieved = {}
        last = first
        async for event in events:
            if isinstance(event, Failure):
                yield f"data: {json.dumps(error_body(event.status, event.message))}\n\n"
                return
            for choice in answer_format.parts(event):
                yield chunk([choice])
            last = event
        assert isinstance(last, LastPiece)
        if usage:
            yield chunk([], usage=last.usage, fusion=last.report)
        if last.explanation is not None:
            yield chunk([], explanation=last.explanation)
        yield "data: [DONE]\n\n"
    except Exception as error:
        LOG.exception("an answer failed midway")
        yield f"data: {json.dumps(error_body(500, f'the server failed: {type(error).__name__}'))}\n\n"
    finally:
        await events.aclose()
