"""The page at `/`: who gets it, and the headers that keep it to itself."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from qcfuse_rag.server import playground
from qcfuse_rag.server.app import make_app
from qcfuse_rag.server.playground import FOLDER
from qcfuse_rag.server.settings import LOOPBACK
from tests.server.test_refusals import FixedBackend, listening
from tests.support.serving import client, error

STATIC = Path(playground.__file__).parent / "static"
NAMES = sorted(path.name for path in STATIC.iterdir())
PATHS = ["/", *(f"{FOLDER}/{name}" for name in NAMES)]


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    app = make_app(FixedBackend(), playground=True)
    async with client(app) as http:
        yield http


@pytest.mark.parametrize("path", PATHS)
async def test_every_file_has_the_headers_that_keep_the_page_to_itself(http: httpx.AsyncClient, path: str) -> None:
    response = await http.get(path)
    assert response.status_code == 200
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cache-control"] == "no-cache"
    types = {".js": ("text/javascript", "application/javascript"), ".css": "text/css", ".svg": "image/svg+xml"}
    assert response.headers["content-type"].startswith(types.get(Path(path).suffix, "text/html"))
    head = await http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    ours = {"content-length", "content-security-policy", "etag"}
    assert {name: head.headers[name] for name in ours} == {name: response.headers[name] for name in ours}


async def test_the_page_names_files_that_are_there_and_nothing_elsewhere(http: httpx.AsyncClient) -> None:
    page = (await http.get("/")).text
    assert set(re.findall(r'(?:src|href)="([^"#]+)"', page)) == {
        "playground/main.js",
        "playground/style.css",
        "playground/icon.svg",
    }
    for name in NAMES:
        text = (STATIC / name).read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*|; // .*", "", text, flags=re.MULTILINE), name
        for imported in re.findall(r'from "\./(.+?)"', text):
            assert imported in NAMES
    assert not re.findall(r"<style|\bstyle=|\bon\w+=|<script(?! type=\"module\" src)", page)


async def test_no_script_writes_html() -> None:
    scripts = "".join(path.read_text("utf-8") for path in STATIC.glob("*.js"))
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", scripts)
    assert not re.findall(r"localStorage|document\.cookie|indexedDB", scripts)


@pytest.mark.enable_socket
async def test_no_path_leads_elsewhere() -> None:
    """Paths are sent as they are: a client would put `..` right."""
    from qcfuse_rag.server.serve import make_server

    app = make_app(FixedBackend(), token="right", playground=True)
    paths = [
        "../app.py",
        "..%2fapp.py",
        "%2e%2e/app.py",
        "%2e%2e%2f%2e%2e%2f%2e%2e%2fpyproject.toml",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "..%5capp.py",
        "main.js%00.css",
        "../v1/models",
        "",
        "none.js",
        "a" * 5000,
    ]
    async with listening(make_server(app, max_requests=2)) as port:
        for path in paths:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {FOLDER}/{path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n".encode())
            answered = await reader.read()
            writer.close()
            assert answered.split(b"\r\n", 1)[0] == b"HTTP/1.1 404 Not Found", path
            assert b"import" not in answered, path
            assert b"root:" not in answered, path


@pytest.mark.parametrize("path", PATHS)
async def test_the_page_needs_no_token_but_the_api_does(path: str) -> None:
    app = make_app(FixedBackend(), token="right", playground=True)
    async with client(app) as http:
        assert (await http.get(path)).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.post(path, content=b"{}")).status_code == 405


async def test_without_a_token_the_page_answers_only_to_this_machines_names() -> None:
    app = make_app(FixedBackend(), hosts=LOOPBACK, playground=True)
    async with client(app) as http:
        for path in PATHS:
            assert (await http.get(path, headers={"Host": "page.example"})).status_code == 421
            assert (await http.get(path, headers={"Host": "localhost:8000"})).status_code == 200


@pytest.mark.parametrize("path", PATHS)
async def test_without_the_playground_there_is_no_page(path: str) -> None:
    async with client(make_app(FixedBackend())) as http:
        response = await http.get(path)
        assert (response.status_code, "the API is at /v1" in error(response)) == (404, True)
