"""The playground: a page for browsers at `/`, which uses the API as any other client does.

The page and its files are the same on every server, so they are served without a token. The page gets its content from
the API, with the token that the user types. A strict content security policy and trusted types keep texts of documents
and answers from being run as HTML or scripts.

https://www.w3.org/TR/CSP3/
https://www.w3.org/TR/trusted-types/
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = "/playground"
"""Path of the page's files."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class PlaygroundFiles(StaticFiles):
    """Serves the page's files with headers that keep the page to itself."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a file, or raise an HTTP error if there is none of this name."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def playground_routes() -> list[BaseRoute]:
    """Return the routes of the page at `/` and of its files."""
    static = PlaygroundFiles(directory=Path(__file__).parent / "static")

    async def page(request: Request) -> Response:
        return await static.get_response("index.html", request.scope)

    return [Route("/", page), Mount(FOLDER, static)]


def is_static(path: str) -> bool:
    """Return whether a path leads to the page or its files only."""
    return path == "/" or path.startswith(f"{FOLDER}/")
