"""Embeddings, by OpenAI's own client: the library's vectors, in either encoding, beside questions and health checks."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from qcfuse_rag import FusionEngine
from qcfuse_rag.library.documents import EMBEDDED_AT_ONCE, ServedLibrary
from qcfuse_rag.library.embedder import Embedder
from qcfuse_rag.library.index import DEFAULT_EMBEDDER, PassageIndex, embedder_source
from qcfuse_rag.library.retriever import Retriever
from qcfuse_rag.server.app import make_app
from qcfuse_rag.server.backend import EngineBackend
from qcfuse_rag.server.embeddings import MAX_TEXTS
from tests.support.passages import PASSAGES, QUESTION
from tests.support.serving import client, error, post

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder(embedder_source(DEFAULT_EMBEDDER))


@pytest.fixture
def library(tmp_path: Path, engine: FusionEngine, embedder: Embedder) -> ServedLibrary:
    index = PassageIndex(DEFAULT_EMBEDDER)
    index.replace({"mill.md": PASSAGES}, embedder.windows(PASSAGES))
    index.save(tmp_path / "passages")
    return ServedLibrary(Retriever.open(tmp_path / "passages"), engine)


@pytest.fixture
def api(http: httpx.AsyncClient) -> Any:
    return openai.AsyncOpenAI(api_key="any", base_url="http://here/v1", http_client=http, max_retries=0)


async def test_both_encodings_are_the_librarys_vectors(api: Any, embedder: Embedder) -> None:
    """The client asks for base64 by itself."""
    expected = embedder(PASSAGES)
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        done = await api.embeddings.create(model=DEFAULT_EMBEDDER, input=PASSAGES, **options)
        vectors = [item.embedding for item in done.data]
        if options == {"encoding_format": "base64"}:
            vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
        np.testing.assert_allclose(np.array(vectors), expected, atol=1e-5)
        assert [item.index for item in done.data] == [0, 1, 2]
        assert (done.object, done.data[0].object, done.model) == ("list", "embedding", DEFAULT_EMBEDDER)
        assert done.usage.prompt_tokens == done.usage.total_tokens == embedder.count_tokens(PASSAGES)


async def test_one_text_and_more_than_fit_a_pass(api: Any, embedder: Embedder) -> None:
    single = await api.embeddings.create(model=DEFAULT_EMBEDDER, input=QUESTION)
    np.testing.assert_allclose(single.data[0].embedding, embedder([QUESTION])[0], atol=1e-5)
    texts = [f"Boat {number}." for number in range(2 * EMBEDDED_AT_ONCE + 1)]
    done = await api.embeddings.create(model=DEFAULT_EMBEDDER, input=texts)
    np.testing.assert_allclose([item.embedding for item in done.data], embedder(texts), atol=1e-5)


async def test_a_long_text_counts_as_far_as_it_is_read(api: Any) -> None:
    done = await api.embeddings.create(model=DEFAULT_EMBEDDER, input="ferry " * 100_000)
    assert done.usage.prompt_tokens <= 512


async def test_bad_requests_say_what_is_wrong(http: httpx.AsyncClient) -> None:
    for changes, status, message in (
        ({"input": []}, 400, "input has no text"),
        ({"input": ["x", ""]}, 400, "or an empty one"),
        ({"input": [1, 2]}, 400, "check_embedding_ctx_length=False"),
        ({"input": {"text": "x"}}, 400, "input"),
        ({"input": ["x"] * (MAX_TEXTS + 1)}, 400, f"at most {MAX_TEXTS}"),
        ({"dimensions": 64}, 400, "dimensions is not supported"),
        ({"encoding_format": "int8"}, 400, "encoding_format"),
        ({"model": "text-embedding-3-small"}, 404, f"there is {DEFAULT_EMBEDDER!r}"),
    ):
        response = await post(http, "embeddings", **{"input": "x", **changes})
        assert (response.status_code, message in error(response)) == (status, True), response.text


async def test_without_a_library_there_is_no_model(backend: EngineBackend) -> None:
    async with client(make_app(backend)) as http:
        response = await post(http, "embeddings", input="x")
    assert (response.status_code, "serve a library" in error(response)) == (404, True)


@pytest.mark.slow
async def test_health_checks_and_questions_are_answered_meanwhile(
    http: httpx.AsyncClient, library: ServedLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass over texts takes 50 ms here; a question waits for one of them, not for all."""
    embed, passes = library._embed, []

    def slow(texts: Sequence[str]) -> NDArray[np.float32]:
        passes.append(len(texts))
        time.sleep(0.05)
        return embed(texts)

    slow.count_tokens, slow.windows = embed.count_tokens, embed.windows  # type: ignore[attr-defined]
    monkeypatch.setattr(library, "_embed", slow)
    texts = ["Ann sings."] * (20 * EMBEDDED_AT_ONCE)
    job = asyncio.create_task(post(http, "embeddings", input=texts))
    while not passes:
        await asyncio.sleep(0.005)
    retrieved = asyncio.ensure_future(asyncio.to_thread(library.retrieve_for, QUESTION, None))
    while not retrieved.done():
        assert (await http.get("/healthz")).status_code == 200
        await asyncio.sleep(0.005)
    assert not job.done()
    assert len(passes) < 12
    assert (await job).status_code == 200


async def test_a_client_who_goes_stops_the_work(library: ServedLibrary) -> None:
    asked = threading.Event()

    def stopped() -> bool:
        return asked.is_set() or bool(asked.set())

    vectors, tokens = library.embed(["x"] * 10 * EMBEDDED_AT_ONCE, stopped)
    assert len(vectors) == EMBEDDED_AT_ONCE
    assert tokens > 0
