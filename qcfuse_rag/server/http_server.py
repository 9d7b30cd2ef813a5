"""The HTTP server in front of the application, with limits on slow clients and on the number of connections."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADERS_S = 15.0
"""Seconds for a client to send a request's headers, from the connection or from the request's first byte."""

SPARE_CONNECTIONS = 512
"""Connections in addition to the answered and waiting requests: idle connections, refusals, health checks."""


def make_server(
    app: Any, *, max_requests: int, headers_s: float = HEADERS_S, protocol: type[asyncio.Protocol] = AutoHTTPProtocol
) -> uvicorn.Server:
    """Return a server that is ready to run.

    Connections above `max_requests` and `SPARE_CONNECTIONS` get 503. A request's headers must be complete in
    `headers_s`.
    """
    config = uvicorn.Config(
        app,
        http=with_header_timeout(protocol, headers_s),
        ws="none",
        log_level="warning",
        limit_concurrency=max_requests + SPARE_CONNECTIONS,
        timeout_graceful_shutdown=60,
    )
    return uvicorn.Server(config)


def with_header_timeout(protocol: type[asyncio.Protocol], headers_s: float) -> type[asyncio.Protocol]:
    """Return a uvicorn protocol that closes connections whose headers are late; uvicorn itself waits forever."""

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

    return HeaderTimeoutProtocol
