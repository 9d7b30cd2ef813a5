"""The HTTP server in front of the application. It waits for no client for long, and holds so many and no more."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADERS_S = 15.0
"""Seconds that a client has from its first byte, or from when it connected, until its headers are there."""

SPARE_CONNECTIONS = 512
"""Connections beside those that are answered or wait: idle ones, refusals, health checks."""


def make_server(
    app: Any, *, requests: int, headers_s: float = HEADERS_S, protocol: type[asyncio.Protocol] = AutoHTTPProtocol
) -> uvicorn.Server:
    """Return a server that is yet to be run.

    Args:
        app: the application.
        requests: that it takes at a time; so many connections and some more are answered, others get 503.
        headers_s: most seconds until a request's headers are there.
        protocol: one of uvicorn's for HTTP.
    """
    config = uvicorn.Config(
        app,
        http=impatient(protocol, headers_s),
        ws="none",
        log_level="warning",
        limit_concurrency=requests + SPARE_CONNECTIONS,
        timeout_graceful_shutdown=60,
    )
    return uvicorn.Server(config)


def impatient(protocol: type[asyncio.Protocol], headers_s: float) -> type[asyncio.Protocol]:
    """Return a protocol of uvicorn's that closes a connection whose headers do not come; uvicorn waits for ever.

    Args:
        protocol: one of uvicorn's for HTTP.
        headers_s: see `make_server`.
    """

    class Impatient(protocol):  # type: ignore[misc, valid-type] # which one it is depends on what is installed
        """Closes the connection unless a request has begun in time."""

        _closing: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop()

        def _watch(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:  # a request is being answered
                self._stop()
            elif self._closing is None:
                self._closing = asyncio.get_running_loop().call_later(headers_s, self.transport.close)

        def _stop(self) -> None:
            if self._closing is not None:
                self._closing.cancel()
            self._closing = None

    return Impatient
