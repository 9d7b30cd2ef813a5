"""Check a request's token or host name, and limit the size of its body, before the application reads it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qcfuse_rag.server.error_responses import error_response

PUBLIC_PATHS = ("/healthz",)
"""Paths without authentication; they reveal nothing about the model or the store."""

SINGLE_HEADERS = (b"authorization", b"host", b"content-length", b"content-type")
"""Headers that decide whether a request is admitted; a proxy in front might go by another one of several."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Host names of the local machine. By DNS rebinding, a web page in a browser can point any other name here as well."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request: its body, its documents, and the seconds until its body has arrived."""

    body_bytes: int = 8 << 20
    documents: int = 256
    body_s: float = 60.0


class AuthMiddleware:
    """Admits requests with the right token and a small enough body; refuses by the headers alone where possible.

    Without a token every request for one of `hosts` is admitted; None allows any host.
    """

    def __init__(self, app: ASGIApp, token: str | None, limits: RequestLimits, hosts: Collection[str] | None) -> None:
        self._app, self._token, self._limits, self._hosts = app, token, limits, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._check_headers(scope)
        await (refusal or self._app)(scope, self._limited(receive), send)

    def _check_headers(self, scope: Scope) -> Response | None:
        headers = dict(scope["headers"])
        names = [name for name, _ in scope["headers"]]
        if repeated := [name.decode() for name in SINGLE_HEADERS if names.count(name) > 1]:
            return error_response(400, f"the header {repeated[0]} is given more than once; send it once", close=True)
        if scope["path"] not in PUBLIC_PATHS and (refusal := self._check_client(headers)) is not None:
            return refusal
        length = headers.get(b"content-length", b"")
        if length and b"transfer-encoding" in headers:  # proxies may disagree on which one applies: request smuggling
            return error_response(400, "Content-Length and Transfer-Encoding exclude each other; send one", close=True)
        limit = self._limits.body_bytes
        if length.isdigit() and int(length) > limit:
            return error_response(413, f"the body has {int(length)} bytes, and this server reads at most {limit}")
        return None

    def _check_client(self, headers: dict[bytes, bytes]) -> Response | None:
        """Refuse a request without the right token, or, if there is no token, for an unknown host name."""
        if self._token is not None:
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not secrets.compare_digest(token, self._token.encode()):
                return error_response(401, "a bearer token is needed; it is missing or wrong")
            return None
        if self._hosts is None or host_of(headers) in self._hosts:
            return None
        names = ", ".join(dict.fromkeys(self._hosts))
        return error_response(421, f"without a token this server answers only as {names}; set QCFUSE_TOKEN on it")

    def _limited(self, receive: Receive) -> Receive:
        """Return a `receive` that limits the size of the body and the time until it is complete."""
        limit, deadline = self._limits.body_bytes, asyncio.get_running_loop().time() + self._limits.body_s
        received, complete = 0, False

        async def limited() -> Message:
            nonlocal received, complete
            if complete:  # the next message is the client's disconnect, whenever it comes
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(408, f"the body did not arrive within {self._limits.body_s:g} s") from error
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > limit:
                raise HTTPException(
                    413, f"the body has at least {received} bytes, and this server reads at most {limit}"
                )
            return message

        return limited


def host_of(headers: dict[bytes, bytes]) -> str | None:
    """Return the name in the `Host` header, without the port; None if there is none."""
    try:
        return urlsplit(f"//{headers.get(b'host', b'').decode('latin-1')}").hostname
    except ValueError:
        return None
