"""Check a request's token or host name, and limit the bytes of bodies, before the application reads them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qcfuse_rag.server.bodies import error_response
from qcfuse_rag.server.playground import is_static
from qcfuse_rag.server.protocol.failures import Failure

PUBLIC_PATHS = ("/healthz",)
"""Paths without authentication; they reveal nothing about the model or the store."""

SINGLE_HEADERS = (b"authorization", b"host", b"content-length", b"content-type")
"""Headers that decide whether a request is admitted.

If such a header is repeated, a proxy may read another copy than this server.
"""

UNCOUNTED_BYTES = 64 << 10
"""Bytes of every body that are not counted in `MAX_ALL_BODIES_BYTES`, so that short requests always pass."""


MAX_BODY_BYTES, MAX_BODY_S = 8 << 20, 60.0
"""Most bytes of a body, and most seconds until it has arrived."""
MAX_ALL_BODIES_BYTES = 64 << 20
"""Most bytes of the bodies of all requests that are read, waiting or answered; a further one gets 429."""


class AuthMiddleware:
    """Admits requests with the right token and a small enough body; refuses by the headers alone where possible.

    Without a token every request for one of `hosts` is admitted; None allows any host.
    """

    def __init__(self, app: ASGIApp, token: str | None, hosts: Collection[str] | None) -> None:
        self._app, self._token, self._hosts = app, token, hosts
        self._counted_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._check_headers(scope)
        limited, forget_body = self._limited(receive)
        try:
            await (refusal or self._app)(scope, limited, send)
        finally:
            forget_body()

    def _check_headers(self, scope: Scope) -> Response | None:
        headers = dict(scope["headers"])
        names = [name for name, _ in scope["headers"]]
        if repeated := [name.decode() for name in SINGLE_HEADERS if names.count(name) > 1]:
            message = f"the header {repeated[0]} is given more than once; send it once"
            return error_response(Failure(400, message), close=True)
        if scope["path"] not in PUBLIC_PATHS and (refusal := self._check_client(headers, scope["path"])) is not None:
            return refusal
        length = headers.get(b"content-length", b"")
        if length and b"transfer-encoding" in headers:  # proxies may disagree on which one applies: request smuggling
            message = "Content-Length and Transfer-Encoding exclude each other; send one"
            return error_response(Failure(400, message), close=True)
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            message = f"the body has {int(length)} bytes, and this server reads at most {MAX_BODY_BYTES}"
            return error_response(Failure(413, message))
        return None

    def _check_client(self, headers: dict[bytes, bytes], path: str) -> Response | None:
        """Refuse a request without the right token, or, if there is no token, for an unknown host name.

        A browser sends no token for a page and its files, which are the same on every server.
        """
        if self._token is not None:
            if is_static(path):
                return None
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not secrets.compare_digest(token, self._token.encode()):
                return error_response(Failure(401, "a bearer token is needed; it is missing or wrong"))
            return None
        if self._hosts is None or host_of(headers) in self._hosts:
            return None
        names = ", ".join(dict.fromkeys(self._hosts))
        message = f"without a token this server answers only as {names}; set QCFUSE_TOKEN on it"
        return error_response(Failure(421, message))

    def _limited(self, receive: Receive) -> tuple[Receive, Callable[[], None]]:
        """Limit the size of a body and the time until it is complete.

        Returns:
            The limited `receive`, and what to call when the body is not held any more.
        """
        deadline = asyncio.get_running_loop().time() + MAX_BODY_S
        received, counted, complete = 0, 0, False

        async def limited() -> Message:
            nonlocal received, counted, complete
            if complete:  # the next message is the client's disconnect, whenever it comes
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(408, f"the body did not arrive within {MAX_BODY_S:g} s") from error
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > MAX_BODY_BYTES:
                refusal = f"the body has at least {received} bytes, and this server reads at most {MAX_BODY_BYTES}"
                raise HTTPException(413, refusal)
            more = max(0, received - UNCOUNTED_BYTES) - counted
            if self._counted_bytes + more > MAX_ALL_BODIES_BYTES:
                raise HTTPException(429, "other requests have long bodies already; ask again later")
            counted += more
            self._counted_bytes += more
            return message

        def forget_body() -> None:
            self._counted_bytes -= counted

        return limited, forget_body


def host_of(headers: dict[bytes, bytes]) -> str | None:
    """Return the name in the `Host` header, without the port; None if there is none."""
    try:
        return urlsplit(f"//{headers.get(b'host', b'').decode('latin-1')}").hostname
    except ValueError:
        return None
