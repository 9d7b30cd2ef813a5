"""The HTTP application: `/v1/models`, `/healthz`, `/metrics`, and the routes of other files."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from qcfuse_rag.server.answers import add_answer_routes
from qcfuse_rag.server.auth_middleware import AuthMiddleware, RequestLimits
from qcfuse_rag.server.backend import Backend
from qcfuse_rag.server.connections import CLIENT_CLOSED
from qcfuse_rag.server.documents import add_document_routes
from qcfuse_rag.server.embeddings import add_embedding_route
from qcfuse_rag.server.protocol.error_responses import error_response
from qcfuse_rag.server.protocol.json_body import JsonBodies

if TYPE_CHECKING:  # needs the extra `cli`
    from qcfuse_rag.library.documents import ServedLibrary


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
        library: whose embedding model clients may use, and whose documents they may list, and change if it is editable;
            None refuses all.
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
        response = error_response(error.status_code, str(error.detail))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def disconnected(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED)

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

    served_model = {"id": backend.name, "object": "model", "created": int(time.time()), "owned_by": "qcfuse-rag"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [served_model]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != backend.name:
            return error_response(404, f"no model {name!r} here; there is {backend.name!r}")
        return JSONResponse(served_model)

    if metrics is not None:

        @app.get("/metrics")
        async def exposition() -> Response:
            return Response(metrics(), media_type="text/plain; version=0.0.4")

    add_document_routes(app, library, read_body=bodies.read, max_documents=limits.documents)
    add_answer_routes(app, backend, bodies=bodies, max_documents=limits.documents)
    add_embedding_route(app, library, bodies=bodies)
    return app
