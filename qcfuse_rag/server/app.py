"""The HTTP application: its routes, and what becomes of their errors."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.library.documents import ServedLibrary
from qcfuse_rag.server.answers import answer_routes
from qcfuse_rag.server.auth_middleware import AuthMiddleware
from qcfuse_rag.server.backend import Backend
from qcfuse_rag.server.bodies import JsonBodies, error_response
from qcfuse_rag.server.documents import document_routes
from qcfuse_rag.server.embeddings import embedding_route
from qcfuse_rag.server.playground import playground_routes
from qcfuse_rag.server.protocol.failures import Failure, failure_of, unknown_model

CORS: dict[str, Any] = {"allow_methods": ["GET", "POST", "DELETE"], "allow_headers": ["*"]}


def make_app(
    backend: Backend,
    *,
    token: str | None = None,
    hosts: Collection[str] | None = None,
    metrics: Callable[[], bytes] | None = None,
    library: ServedLibrary | None = None,
    playground: bool = False,
    origins: Sequence[str] = (),
    on_shutdown: Callable[[], None] = lambda: None,
) -> Starlette:
    """Return the application; `token`, `hosts`, `playground` and `origins` are those of `ServerSettings`.

    `metrics` returns metrics in Prometheus' text format; None disables `/metrics`. Clients may use the embedding model
    of the `library`, and list its documents, or change them if it is editable. `on_shutdown` is called after the last
    request.
    """
    bodies = JsonBodies()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        gc.collect()
        gc.freeze()  # else every full collection walks model and libraries: a third of a second without health checks
        yield
        gc.unfreeze()
        await asyncio.to_thread(on_shutdown)

    routes = [
        *_status_routes(backend, metrics),
        *document_routes(library, bodies),
        *answer_routes(backend, bodies),
        embedding_route(library, bodies),
        *(playground_routes() if playground else []),
    ]
    return Starlette(
        routes=routes,
        middleware=[
            # Outside of the other one, because browsers ask without the token whether they may send it.
            *([Middleware(CORSMiddleware, allow_origins=origins, **CORS)] if origins else []),
            Middleware(AuthMiddleware, token=token, hosts=hosts),
        ],
        exception_handlers={
            HTTPException: _refused,
            QCFuseError: _rejected,
            ClientDisconnect: _disconnected,
            Exception: _failed,
        },
        lifespan=lifespan,
    )


def _status_routes(backend: Backend, metrics: Callable[[], bytes] | None) -> list[Route]:
    served_model = {"id": backend.name, "object": "model", "created": int(time.time()), "owned_by": "qcfuse-rag"}

    async def health(_: Request) -> Response:
        reason = backend.ready()
        return JSONResponse({"status": "ok" if reason is None else reason}, 200 if reason is None else 503)

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [served_model]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != backend.name:
            return error_response(unknown_model(name, backend.name))
        return JSONResponse(served_model)

    async def exposition(_: Request) -> Response:
        if metrics is None:
            raise HTTPException(404)
        return Response(metrics(), media_type="text/plain; version=0.0.4")

    return [
        Route("/healthz", health),
        Route("/metrics", exposition),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
    ]


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = "there is nothing at this path; the API is at /v1" if error.status_code == 404 else str(error.detail)
    response = error_response(Failure(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


async def _rejected(_: Request, error: Exception) -> Response:
    return error_response(failure_of(error))


async def _disconnected(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # which nobody receives


async def _failed(_: Request, error: Exception) -> Response:
    return error_response(Failure(500, f"the server failed: {type(error).__name__}"))
