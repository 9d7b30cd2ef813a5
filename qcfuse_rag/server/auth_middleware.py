"""Who is let in, by which name, and with how large a body."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qcfuse_rag.server.error_responses import failure

OPEN = ("/healthz",)
"""Paths that need no token: they say nothing of what is served."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names by which a machine calls itself. A page that a browser shows can have any other lead here too."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may be.

    Attributes:
        body_bytes: most bytes of a body.
        documents: most documents.
        body_s: most seconds until a body is there.
    """

    body_bytes: int = 8 << 20
    documents: int = 256
    body_s: float = 60.0


class Guard:
    """Lets in who has the token, with bodies that are not too large; what headers show is said before a body is read.

    Args:
        app: what is behind it.
        token: None lets everybody in who asks by one of `hosts`.
        limits: of requests.
        hosts: names to be asked by where there is no token; None takes any.
    """

    def __init__(self, app: ASGIApp, token: str | None, limits: Limits, hosts: Collection[str] | None) -> None:
        self._app, self._token, self._limits, self._hosts = app, token, limits, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, self._bounded(receive), send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = dict(scope["headers"])
        if scope["path"] not in OPEN and (refusal := self._unknown(headers)) is not None:
            return refusal
        length = headers.get(b"content-length", b"")
        if length and b"transfer-encoding" in headers:  # servers on the way may each go by another one
            return failure(400, "Content-Length and Transfer-Encoding exclude each other; send one", close=True)
        most = self._limits.body_bytes
        if length.isdigit() and int(length) > most:
            return failure(413, f"the body has {int(length)} bytes, and this server reads at most {most}")
        return None

    def _unknown(self, headers: dict[bytes, bytes]) -> Response | None:
        """Refuse who does not give the token, or, where there is none, asks by a name that may be anybody's."""
        if self._token is not None:
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            if kind.lower() != b"bearer" or not secrets.compare_digest(given, self._token.encode()):
                return failure(401, "a bearer token is needed, and this is not it")
            return None
        if self._hosts is None or host_of(headers) in self._hosts:
            return None
        names = ", ".join(dict.fromkeys(self._hosts))
        return failure(421, f"without a token this server goes by {names} alone; set QCFUSE_TOKEN where it runs")

    def _bounded(self, receive: Receive) -> Receive:
        """Return a `receive` that takes no more of a body than may be, and waits for it no longer."""
        most, late = self._limits.body_bytes, asyncio.get_running_loop().time() + self._limits.body_s
        taken, whole = 0, False

        async def bounded() -> Message:
            nonlocal taken, whole
            if whole:  # and what comes now is that the client goes
                return await receive()
            try:
                async with asyncio.timeout_at(late):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(408, f"the body was not there within {self._limits.body_s:g} s") from error
            taken += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if taken > most:
                raise HTTPException(413, f"the body goes on after {taken} bytes, and this server reads at most {most}")
            return message

        return bounded


def host_of(headers: dict[bytes, bytes]) -> str | None:
    """Return the name in `Host`, without the port; None if there is none."""
    try:
        return urlsplit(f"//{headers.get(b'host', b'').decode('latin-1')}").hostname
    except ValueError:
        return None
