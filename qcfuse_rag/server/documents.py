"""`/v1/documents`: clients list, add and remove the documents of the library that the server answers from."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from anyio import to_thread
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from qcfuse_rag.errors import Busy, InvalidSetting, QCFuseError
from qcfuse_rag.library.documents import ServedLibrary
from qcfuse_rag.server.bodies import JsonBodies, error_response, wait_while_connected
from qcfuse_rag.server.event_response import event_response
from qcfuse_rag.server.protocol.failures import Failure, failure_of
from qcfuse_rag.server.protocol.generation_request import MAX_DOCUMENTS, FailFastList, refuse_more

T = TypeVar("T")

FORGET_WAIT_S = 5.0
"""Seconds that a removal waits for changes before it."""


class Document(BaseModel):
    """A document: its name, by which it is replaced and removed, and its text."""

    source: str = Field(min_length=1, max_length=1024)
    text: str = Field(min_length=1)


class AddRequest(BaseModel):
    """The body of a request to add documents; a stream tells the progress."""

    documents: FailFastList[Document] = Field(min_length=1)
    stream: bool | None = None


def document_routes(library: ServedLibrary | None, bodies: JsonBodies) -> list[Route]:
    """Return the routes: clients may list a library's documents, and change them if it is editable."""
    jobs = Jobs()

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
        refuse_more(MAX_DOCUMENTS, body.documents, "documents")
        [(name, count)] = Counter(document.source for document in body.documents).most_common(1)
        if count > 1:
            raise InvalidSetting(f"{count} documents are named {name!r}; each needs a name of its own", "documents")
        documents = {document.source: document.text for document in body.documents}
        steps: asyncio.Queue[dict[str, int]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def note(done: int, total: int) -> None:
            loop.call_soon_threadsafe(steps.put_nowait, {"done": done, "total": total})

        job = asyncio.ensure_future(jobs.run(partial(changed.add, documents, note)))
        if body.stream:
            return event_response(progress_stream(job, steps))
        try:
            await wait_while_connected(job, request)
            return JSONResponse(job.result())
        except QCFuseError as error:
            return error_response(job_failure(error))
        finally:
            job.cancel()

    async def forget(request: Request) -> Response:
        source = request.path_params["source"]
        try:
            removed = await jobs.run(partial(editable().forget, source), wait_s=FORGET_WAIT_S)
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
    """Say why a change failed; that another job is at work is a conflict."""
    return Failure(409, str(error)) if isinstance(error, Busy) else failure_of(error)


class Jobs:
    """Changes of a library, one at a time, each in a thread that does not keep the process from ending."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()

    async def run(self, change: Callable[[], T], *, wait_s: float | None = None) -> T:
        """Wait for the changes before, and make one; raise `Busy` if they take longer than some seconds.

        A change that waits is dropped if this is cancelled; one that has begun is made.
        """
        try:
            async with asyncio.timeout(wait_s):
                await self._free.acquire()
        except TimeoutError as error:
            raise Busy("documents are being added; ask again later") from error
        done: Future[T] = Future()

        def work() -> None:
            try:
                done.set_result(change())
            except BaseException as error:
                done.set_exception(error)

        changing = asyncio.wrap_future(done)
        changing.add_done_callback(lambda _: self._free.release())
        try:
            threading.Thread(target=work, name="qcfuse-documents", daemon=True).start()
        except RuntimeError as error:  # of a system that has no more threads
            done.set_exception(error)
        return await asyncio.shield(changing)


async def progress_stream(job: asyncio.Future[Any], steps: asyncio.Queue[dict[str, int]]) -> AsyncGenerator[str, None]:
    """Yield the tokens done and in total as server-sent events, then the result; without a client a job goes on."""
    try:
        while not (job.done() and steps.empty()):
            step = asyncio.ensure_future(steps.get())
            await asyncio.wait({job, step}, return_when=asyncio.FIRST_COMPLETED)
            if step.done():
                yield f"data: {json.dumps(step.result())}\n\n"
            else:
                step.cancel()
        yield f"data: {json.dumps(job.result())}\n\ndata: [DONE]\n\n"
    except Exception as error:
        yield job_failure(error).event
    finally:
        job.cancel()
