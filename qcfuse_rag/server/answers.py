"""`POST /v1/chat/completions` and `POST /v1/completions`: the routes that answer."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from anyio import to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from qcfuse_rag.server.backend import Backend
from qcfuse_rag.server.bodies import JsonBodies, error_response, long_json_response, wait_while_connected
from qcfuse_rag.server.event_response import event_response
from qcfuse_rag.server.protocol.chat_request import ChatRequest
from qcfuse_rag.server.protocol.events import (
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    Event,
    LastPiece,
    Piece,
    Queued,
    join_pieces,
)
from qcfuse_rag.server.protocol.failures import Failure, failure_of, unknown_model
from qcfuse_rag.server.protocol.generation_request import CompletionRequest, GenerationRequest

HEADERS_S = 1.0
"""Most seconds until a stream's headers are sent; a request that is refused by then has another status than 200."""


def answer_routes(backend: Backend, bodies: JsonBodies) -> list[Route]:
    """Return the two routes."""

    async def chat(request: Request) -> Response:
        return await respond(request, await bodies.read(request, ChatRequest), ChatFormat())

    async def complete(request: Request) -> Response:
        return await respond(request, await bodies.read(request, CompletionRequest), CompletionFormat())

    async def respond(request: Request, generation_request: GenerationRequest, answer_format: AnswerFormat) -> Response:
        if generation_request.model and generation_request.model != backend.name:
            return error_response(unknown_model(generation_request.model, backend.name))
        await to_thread.run_sync(generation_request.refuse_unsupported, limiter=bodies.threads)
        events = backend.answer(generation_request)
        header = {
            "id": f"{answer_format.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": backend.name,
            "system_fingerprint": None,
        }
        if not generation_request.stream:
            return await json_response(events, answer_format, header, request)
        first = asyncio.ensure_future(anext(events))
        try:
            await wait_while_connected(first, request, HEADERS_S)
        except ClientDisconnect:
            first.cancel()
            await asyncio.wait({first})
            raise
        if first.done() and isinstance(refusal := first.result(), Failure):
            await events.aclose()
            return error_response(refusal)
        usage = generation_request.stream_options is not None and generation_request.stream_options.include_usage
        return event_response(event_stream(resume(first, events), answer_format, header, usage=usage))

    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
    ]


async def resume(first: asyncio.Future[Event], events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """Yield the first event, which is awaited already, and the others."""
    async with aclosing(events):
        yield await first
        async for event in events:
            yield event


async def json_response(
    events: AsyncGenerator[Event, None], answer_format: AnswerFormat, header: dict[str, Any], request: Request
) -> Response:
    """Collect all events and return the answers as one JSON body; cancel them if the client disconnects."""
    collecting = asyncio.ensure_future(collect(events))
    try:
        await wait_while_connected(collecting, request)
    finally:
        if collecting.cancel():
            await asyncio.wait({collecting})
        await events.aclose()
    if isinstance(collected := collecting.result(), Failure):
        return error_response(collected)
    header["system_fingerprint"], answers = collected
    first, last, choices = answers[0], answers[-1], [answer_format.whole(answer) for answer in answers]
    body = {"object": answer_format.kind, **header, "choices": choices, "usage": last.usage, "fusion": last.report}
    extra = {"documents": first.documents, "explanation": last.explanation}
    body |= {name: value for name, value in extra.items() if value is not None}
    return JSONResponse(body) if last.logprobs is None else await long_json_response(body)


async def collect(events: AsyncGenerator[Event, None]) -> tuple[str | None, list[LastPiece]] | Failure:
    """Return the fingerprint and the answers, or the first failure."""
    fingerprint, answers = None, list[list[Piece]]()
    async for event in events:
        if isinstance(event, Failure):
            return event
        if isinstance(event, Queued):
            fingerprint = event.fingerprint
        elif event.index == len(answers):
            answers.append([event])
        else:
            answers[event.index].append(event)
    return fingerprint, [join_pieces(pieces) for pieces in answers]


async def event_stream(
    events: AsyncGenerator[Event, None], answer_format: AnswerFormat, header: dict[str, Any], *, usage: bool
) -> AsyncGenerator[str, None]:
    """Yield server-sent events; a failure midway is an event too, and then no `[DONE]` follows.

    With `usage` they end with the usage of the request and the report; the field is null before that.
    """
    no_usage, last = {"usage": None} if usage else {}, Piece()

    def chunk(choices: list[dict[str, Any]], **fields: Any) -> str:
        body = {"object": answer_format.chunk_kind, **header, "choices": choices, **no_usage, **fields}
        return f"data: {json.dumps(body)}\n\n"

    try:
        async for event in events:
            if isinstance(event, Failure):
                yield event.event
                return
            if isinstance(event, Queued):
                header["system_fingerprint"] = event.fingerprint
                continue
            retrieved = {} if event.documents is None else {"documents": event.documents}
            for choice in answer_format.parts(event):
                yield chunk([choice], **retrieved)
                retrieved = {}
            last = event
        assert isinstance(last, LastPiece)
        if usage:
            yield chunk([], usage=last.usage, fusion=last.report)
        if last.explanation is not None:
            yield chunk([], explanation=last.explanation)
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield failure_of(error).event
    finally:
        await events.aclose()
