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

from qcfuse_rag.errors import Busy, QCFuseError, StoreError
from qcfuse_rag.library.documents import ServedLibrary
from qcfuse_rag.server.bodies import CLIENT_CLOSED, JsonBodies, error_response, wait_while_connected
from qcfuse_rag.server.event_response import event_response
from qcfuse_rag.server.protocol.failures import Failure, failure_of
from qcfuse_rag.server.protocol.generation_request import FailFastList

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


def document_routes(library: ServedLibrary | None, bodies: JsonBodies, max_documents: int) -> list[Route]:
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

        job = Job(jobs, partial(changed.add, documents, note))
        if body.stream:
            return event_response(progress_stream(job, steps))
        try:
            if not await wait_while_connected(job.result, request):
                return Response(status_code=CLIENT_CLOSED)
            return JSONResponse(job.result.result())
        except QCFuseError as error:
            return error_response(job_failure(error))
        finally:
            job.drop()

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
    """Say why a change failed: another job is at work, the disk is at fault, or the request is."""
    if isinstance(error, Busy | StoreError):
        return Failure(409 if isinstance(error, Busy) else 500, str(error))
    return failure_of(error)


class Jobs:
    """Changes of a library, one at a time, each in a thread that does not keep the process from ending."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()

    async def run(
        self, change: Callable[[], T], *, wait_s: float | None = None, begin: Callable[[], object] = bool
    ) -> T:
        """Wait for the changes before, and make one; raise `Busy` if they take longer than some seconds."""
        try:
            await asyncio.wait_for(self._free.acquire(), wait_s)
        except TimeoutError as error:
            raise Busy("documents are being added; ask again later") from error
        try:
            begin()
            done: Future[T] = Future()

            def work() -> None:
                try:
                    done.set_result(change())
                except BaseException as error:
                    done.set_exception(error)

            threading.Thread(target=work, name="qcfuse-documents", daemon=True).start()
            return await asyncio.wrap_future(done)
        finally:
            self._free.release()


class Job:
    """A change that waits, is made or was made; one that waits can be dropped."""

    def __init__(self, jobs: Jobs, change: Callable[[], dict[str, Any]]) -> None:
        self._begun = False
        self.result = asyncio.ensure_future(jobs.run(change, begin=self._begin))

    def drop(self) -> None:
        """Drop the change with its documents if it has not begun."""
        if not self._begun:
            self.result.cancel()

    def _begin(self) -> None:
        self._begun = True


async def progress_stream(job: Job, steps: asyncio.Queue[dict[str, int]]) -> AsyncGenerator[str, None]:
    """Yield the tokens done and in total as server-sent events, then the result; without a client a job goes on."""
    try:
        while not (job.result.done() and steps.empty()):
            step = asyncio.ensure_future(steps.get())
            await asyncio.wait({job.result, step}, return_when=asyncio.FIRST_COMPLETED)
            if step.done():
                yield f"data: {json.dumps(step.result())}\n\n"
            else:
                step.cancel()
        yield f"data: {json.dumps(job.result.result())}\n\ndata: [DONE]\n\n"
    except Exception as error:
        yield job_failure(error).event
    finally:
        job.drop()
