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
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.server.backend import Backend
from qcfuse_rag.server.connections import CLIENT_CLOSED, long_json_response, wait_while_connected
from qcfuse_rag.server.protocol.answer_formats import AnswerFormat, ChatFormat, CompletionFormat
from qcfuse_rag.server.protocol.chat_request import ChatRequest
from qcfuse_rag.server.protocol.completion_request import CompletionRequest
from qcfuse_rag.server.protocol.error_responses import error_body, error_response
from qcfuse_rag.server.protocol.events import Event
from qcfuse_rag.server.protocol.generation_request import GenerationRequest
from qcfuse_rag.server.protocol.json_body import JsonBodies

LOG = logging.getLogger(__name__)


def add_answer_routes(app: FastAPI, backend: Backend, *, bodies: JsonBodies, max_documents: int) -> None:
    """Add the two routes to an application.

    Args:
        app: the application.
        backend: answers.
        bodies: reads and checks bodies.
        max_documents: of one request.
    """

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        chat_request = await bodies.read(request, ChatRequest)
        count = len(chat_request.given_documents or ())
        if count > max_documents:
            return error_response(400, f"{count} documents, and at most {max_documents} are allowed")
        return await respond(request, chat_request, ChatFormat())

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        completion_request = await bodies.read(request, CompletionRequest)
        return await respond(request, completion_request, CompletionFormat())

    async def respond(request: Request, generation_request: GenerationRequest, answer_format: AnswerFormat) -> Response:
        if generation_request.model and generation_request.model != backend.name:
            return error_response(404, f"no model {generation_request.model!r} here; there is {backend.name!r}")
        try:
            await to_thread.run_sync(generation_request.refuse_unsupported, limiter=bodies.threads)
        except QCFuseError as error:
            return error_response(400, str(error))
        events = backend.answer(generation_request)
        first = await wait_for_event(events, request)
        if first is None:
            return Response(status_code=CLIENT_CLOSED)
        if first.error is not None:
            await events.aclose()
            return error_response(first.status, first.error)
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
    first: Event,
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
            if event is None:
                return Response(status_code=CLIENT_CLOSED)
            if event.error is not None:
                return error_response(event.status, event.error)
            if event.index == len(answers):
                answers.append([])
            answers[event.index].append(event)
            last = event
            if await request.is_disconnected():
                return Response(status_code=CLIENT_CLOSED)
    finally:
        await events.aclose()
    choices = [answer_format.whole(answer) for answer in answers]
    body = {"object": answer_format.kind, **header, "choices": choices, "usage": last.usage, "fusion": last.report}
    extra = {"documents": first.documents, "explanation": last.explanation}
    body |= {name: value for name, value in extra.items() if value is not None}
    return JSONResponse(body) if last.logprobs is None else await long_json_response(body)


async def event_stream(
    first: Event,
    events: AsyncGenerator[Event, None],
    answer_format: AnswerFormat,
    header: dict[str, Any],
    *,
    usage: bool,
) -> AsyncIterator[str]:
    """Yield server-sent events; a failure midway is an event too, and then no `[DONE]` follows.

    Args:
        first: the first event.
        events: the next ones.
        answer_format: what pieces look like.
        header: fields of every piece.
        usage: end with the usage of the request and the report; the field is null before that.
    """
    no_usage = {"usage": None} if usage else {}

    def chunk(choices: list[dict[str, Any]], **fields: Any) -> str:
        body = {"object": answer_format.chunk_kind, **header, "choices": choices, **no_usage, **fields}
        return f"data: {json.dumps(body)}\n\n"

    try:
        retrieved: dict[str, Any] = {} if first.documents is None else {"documents": first.documents}
        for choice in answer_format.pieces(first):
            yield chunk([choice], **retrieved)
            retrieved = {}
        event = first
        async for event in events:
            if event.error is not None:
                yield f"data: {json.dumps(error_body(event.status, event.error))}\n\n"
                return
            for choice in answer_format.pieces(event):
                yield chunk([choice])
        if usage:
            yield chunk([], usage=event.usage, fusion=event.report)
        if event.explanation is not None:
            yield chunk([], explanation=event.explanation)
        yield "data: [DONE]\n\n"
    except Exception as error:
        LOG.exception("an answer failed midway")
        yield f"data: {json.dumps(error_body(500, f'the server failed: {type(error).__name__}'))}\n\n"
    finally:
        await events.aclose()
