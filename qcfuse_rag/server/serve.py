"""A server over a library or a store, in one process: what it consists of, made from its settings."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.engine.scheduler import EngineHandle, SchedulerSettings
from qcfuse_rag.library.documents import ServedLibrary
from qcfuse_rag.library.folder import index_folder, library_of
from qcfuse_rag.library.index import METADATA
from qcfuse_rag.library.jobs import forget_source, job_lock
from qcfuse_rag.library.retriever import Retriever
from qcfuse_rag.library.settings import embedder_name
from qcfuse_rag.server.app import make_app
from qcfuse_rag.server.backend import EngineBackend
from qcfuse_rag.server.idle_warming import IdleWarming
from qcfuse_rag.server.settings import ServerSettings

HEADERS_S = 15.0
"""Seconds for a client to send a request's headers, from the connection or from the request's first byte."""

DRAIN_S = 8
"""Seconds for the answers in progress when the server is to end."""

SPARE_CONNECTIONS = 512
"""Connections in addition to the answered and waiting requests: idle connections, refusals, health checks."""


class LibraryServer:
    """Answers over the folder of a library or a store with one engine, which the caller closes."""

    def __init__(
        self, engine: FusionEngine, folder: Path, settings: ServerSettings, opened: Retriever | None = None
    ) -> None:
        self._engine, self._max_requests = engine, settings.waiting + SchedulerSettings().active
        handle = EngineHandle.wrap(engine, SchedulerSettings(waiting=self._max_requests))
        library = None
        if opened is not None:
            around, count, editable = library_of(folder), settings.top_k, settings.editable
            changing = partial(job_lock, around)
            library = ServedLibrary(opened, engine, count=count, editable=editable, changing=changing)
            library.forget_listeners.append(partial(forget_source, around))
        backend = EngineBackend(
            handle,
            settings.served_name(engine.lm.name),
            most_tokens=settings.most_tokens,
            fidelity=settings.fidelity,
            max_requests=self._max_requests,
            library=library,
            retrieve=settings.retrieve,
            idle_warming=IdleWarming(handle, library) if settings.keep else None,
        )
        self._app = make_app(
            backend,
            token=settings.token,
            hosts=settings.hosts,
            metrics=_metrics(engine),
            library=library,
            playground=not settings.no_playground,
            origins=settings.allowed_origins,
            on_shutdown=backend.close,
        )

    def notes(self) -> list[str]:
        """Return what works less well than it could, for the user to read; known once the engine is compiled."""
        runner, notes = self._engine.runner, []
        if not self._engine.prompts.chat_template.shows_tools:
            notes.append("the model's chat template has no place for tools; requests with tools are refused")
        for work, refusal in (("fused passes", runner.prefills.refusal), ("decode steps", runner.decodes.refusal)):
            if self._engine.lm.device.type == "cuda" and refusal is not None:
                notes.append(f"{work} are launched kernel by kernel: {refusal}")
        return notes

    def run(self, listener: socket.socket) -> None:
        """Serve until the process is interrupted or terminated, then finish the requests in progress."""
        # uvicorn raises the signal that stopped it again, which would end this process before the store is closed.
        previous_handler = signal.signal(signal.SIGTERM, lambda *_: None)
        with suppress(KeyboardInterrupt):
            make_server(self._app, max_requests=self._max_requests).run(sockets=[listener])
        signal.signal(signal.SIGTERM, previous_handler)


def open_passages(folder: Path, embedder: str | None) -> Retriever | None:
    """Open the passages of the library round a store, given the folder of either; None if it has none."""
    passages = index_folder(library_of(folder))
    return Retriever.open(passages, embedder_name(embedder)) if (passages / METADATA).is_file() else None


def make_server(
    app: Any, *, max_requests: int, headers_s: float = HEADERS_S, protocol: type[asyncio.Protocol] = AutoHTTPProtocol
) -> uvicorn.Server:
    """Return an HTTP server that is ready to run.

    Connections above `max_requests` and `SPARE_CONNECTIONS` get 503. A request's headers must be complete in
    `headers_s`; uvicorn itself would wait forever.
    """

    class HeaderTimeoutProtocol(protocol):  # type: ignore[misc, valid-type] # the base depends on what is installed
        """Closes the connection unless a request begins in time."""

        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self._update_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._update_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop_timer()

        def _update_timer(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:  # a request is being answered
                self._stop_timer()
            elif self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(headers_s, self.transport.close)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None

    config = uvicorn.Config(
        app,
        http=HeaderTimeoutProtocol,
        ws="none",
        log_level="warning",
        limit_concurrency=max_requests + SPARE_CONNECTIONS,
        timeout_graceful_shutdown=DRAIN_S,
    )
    return uvicorn.Server(config)


def _metrics(engine: FusionEngine) -> Callable[[], bytes] | None:
    """Return a function that renders the engine's metrics as text; None if prometheus-client is not installed."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest

        from qcfuse_rag.monitoring.metrics import Metrics
    except ImportError:
        return None
    registry = CollectorRegistry()
    engine.observe(Metrics(registry))
    return lambda: generate_latest(registry)
