"""`/v1/documents`: clients list, add and remove the documents of the library that the server answers from."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

from anyio import CapacityLimiter, to_thread
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from qcfuse_rag.errors import Busy, QCFuseError, StoreError
from qcfuse_rag.library.documents import ServedLibrary
from qcfuse_rag.server.bodies import JsonBodies, error_response
from qcfuse_rag.server.event_response import event_response
from qcfuse_rag.server.protocol.failures import Failure, failure_of
from qcfuse_rag.server.protocol.generation_request import FailFastList


class Document(BaseModel):
    """A document: its name, by which it is replaced and removed, and its text."""

    source: str = Field(min_length=1, max_length=1024)
    text: str = Field(min_length=1)


class AddRequest(BaseModel):
    """The body of a request to add documents; a stream tells the progress."""

    documents: FailFastList[Document] = Field(min_length=1)
    stream: bool | None = None


def document_routes(library: ServedLibrary | None, bodies: JsonBodies, max_documents: int) -> list[Route]:
    """Return the routes: clients may list a library's documents, and change them if it is editable."""
    jobs = CapacityLimiter(1)

    def editable() -> ServedLibrary:
        if library is None or not library.editable:
            refusal = (
                "clients may not change documents here; start the server with --editable over a library to let them"
            )
            raise HTTPException(403, refusal)
        return library

    async def listed(_: Request) -> Response:
        if library is None:
            message = "there are no documents here; serve a library of `qcfuse warm run`, without Ray"
            return error_response(Failure(404, message))
        documents = await to_thread.run_sync(library.documents)
        return JSONResponse({"object": "list", "data": documents, "editable": library.editable})

    async def add(request: Request) -> Response:
        changed = editable()
        body = await bodies.read(request, AddRequest)
        if len(body.documents) > max_documents:
            message = f"{len(body.documents)} documents, and at most {max_documents} are allowed"
            return error_response(Failure(400, message, "array_above_max_length", "documents"))
        [(name, count)] = Counter(document.source for document in body.documents).most_common(1)
        if count > 1:
            message = f"{count} documents are named {name!r}; each needs a name of its own"
            return error_response(Failure(400, message, "invalid_value", "documents"))
        documents = {document.source: document.text for document in body.documents}
        steps: asyncio.Queue[dict[str, int]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def note(done: int, total: int) -> None:
            loop.call_soon_threadsafe(steps.put_nowait, {"done": done, "total": total})

        job = asyncio.ensure_future(to_thread.run_sync(changed.add, documents, note, limiter=jobs))
        if body.stream:
            return event_response(progress_stream(job, steps))
        try:
            return JSONResponse(await asyncio.shield(job))
        except QCFuseError as error:
            return error_response(job_failure(error))

    async def forget(request: Request) -> Response:
        source = request.path_params["source"]
        try:
            removed = await to_thread.run_sync(editable().forget, source, limiter=jobs)
        except QCFuseError as error:
            return error_response(job_failure(error))
        if not any(removed.values()):
            return error_response(Failure(404, f"no document {source!r} in this library"))
        return JSONResponse(removed)

    return [
        Route("/v1/documents", listed),
        Route("/v1/documents", add, methods=["POST"]),
        Route("/v1/documents/{source:path}", forget, methods=["DELETE"]),
    ]


def job_failure(error: Exception) -> Failure:
    """Say why a change failed: another job is at work, the disk is at fault, or the request is."""
    if isinstance(error, Busy | StoreError):
        return Failure(409 if isinstance(error, Busy) else 500, str(error))
    return failure_of(error)


async def progress_stream(
    job: asyncio.Future[dict[str, Any]], steps: asyncio.Queue[dict[str, int]]
) -> AsyncGenerator[str, None]:
    """Yield the tokens done and in total as server-sent events, then the result; the job goes on if the client goes."""
    while not (job.done() and steps.empty()):
        step = asyncio.ensure_future(steps.get())
        await asyncio.wait({job, step}, return_when=asyncio.FIRST_COMPLETED)
        if step.done():
            yield f"data: {json.dumps(step.result())}\n\n"
        else:
            step.cancel()
    try:
        yield f"data: {json.dumps(job.result())}\n\ndata: [DONE]\n\n"
    except Exception as error:
        yield job_failure(error).event
