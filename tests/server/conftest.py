"""A server over the engine of the test, without a socket. A module may give its own engine, library or limits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from qcfuse_rag import FusionEngine
from qcfuse_rag.engine.scheduler import EngineHandle
from qcfuse_rag.library.documents import ServedLibrary
from qcfuse_rag.server.app import make_app
from qcfuse_rag.server.backend import EngineBackend
from tests.support.serving import client


@pytest.fixture
def library() -> ServedLibrary | None:
    """Return the library that is served."""
    return None


@pytest.fixture
def limits() -> dict[str, Any]:
    """Return the limits of the backend."""
    return {}


@pytest.fixture
def backend(engine: FusionEngine, library: ServedLibrary | None, limits: dict[str, Any]) -> Iterator[EngineBackend]:
    backend = EngineBackend(EngineHandle.wrap(engine), "tiny", library=library, **limits)
    yield backend
    backend.close()


@pytest.fixture
async def http(backend: EngineBackend, library: ServedLibrary | None) -> AsyncIterator[httpx.AsyncClient]:
    async with client(make_app(backend, library=library)) as http:
        yield http
