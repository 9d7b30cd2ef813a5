"""Reranking over HTTP: the form that clients share, the engine's scores, and refusals in OpenAI's words."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from qcfuse_rag import FusionEngine
from qcfuse_rag.server.app import make_app
from qcfuse_rag.server.backend import EngineBackend
from qcfuse_rag.server.protocol.generation_request import MAX_DOCUMENTS
from qcfuse_rag.server.rerank import AT_ONCE, RerankRequest, reranked
from tests.support.passages import PASSAGES, QUESTION
from tests.support.serving import JSON, client, error, post

ASKED: dict[str, Any] = {"query": QUESTION, "documents": PASSAGES}


@pytest.fixture
def engine(engine: FusionEngine) -> FusionEngine:
    engine.warm(PASSAGES)
    return engine


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
async def test_results_are_the_engines_best_first(http: httpx.AsyncClient, engine: FusionEngine, path: str) -> None:
    documents = [PASSAGES[0], {"text": PASSAGES[1]}, {"text": PASSAGES[2], "title": "a field of the client"}]
    body = (await http.post(path, content=json.dumps({**ASKED, "documents": documents}), headers=JSON)).json()
    expected = engine.rerank(QUESTION, PASSAGES)
    assert [result["index"] for result in body["results"]] == list(expected.order)
    assert [result["relevance_score"] for result in body["results"]] == pytest.approx(
        [expected.relevance[index] for index in expected.order]
    )
    assert all(
        0 < result["relevance_score"] < 1 and set(result) == {"index", "relevance_score"} for result in body["results"]
    )
    tokens = expected.prompt_tokens
    assert body["usage"] == {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": tokens - expected.rows},
    }
    assert (body["object"], body["model"], body["id"][:7]) == ("list", "tiny", "rerank-")


async def test_the_best_come_with_their_texts_if_that_is_asked_for(
    http: httpx.AsyncClient, engine: FusionEngine
) -> None:
    best = engine.rerank(QUESTION, PASSAGES).order
    for top_n in (1, 2, 9):
        body = (await post(http, "rerank", **ASKED, top_n=top_n, return_documents=True, model="tiny")).json()
        assert [result["document"] for result in body["results"]] == [{"text": PASSAGES[i]} for i in best[:top_n]]


async def test_more_documents_than_are_scored_at_once(http: httpx.AsyncClient) -> None:
    documents = [f"Boat {number}. {PASSAGES[number % 3]}" for number in range(AT_ONCE + 1)]
    results = (await post(http, "rerank", query=QUESTION, documents=documents)).json()["results"]
    assert sorted(result["index"] for result in results) == list(range(AT_ONCE + 1))
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)


async def test_bad_requests_say_what_is_wrong(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qcfuse_rag.server.rerank.MAX_DOCUMENT_TOKENS", 200)
    for changes, status, message, param, code in (
        ({"query": ""}, 400, "question without text", "query", "invalid_value"),
        ({"query": None}, 400, "valid string", "query", "invalid_type"),
        ({"documents": []}, 400, "at least 1", "documents", "invalid_value"),
        ({"documents": [1]}, 400, "valid string", "documents.0", "invalid_type"),
        ({"documents": ["x", {"image": "y"}]}, 400, "valid string", "documents.1", "invalid_type"),
        ({"documents": ["x"] * (MAX_DOCUMENTS + 1)}, 400, "at most 256", "documents", "array_above_max_length"),
        ({"documents": PASSAGES * 20}, 400, "at most 200 are allowed", "documents", "invalid_value"),
        ({"top_n": 0}, 400, "greater than or equal to 1", "top_n", "invalid_value"),
        ({"model": "rerank-v3.5"}, 404, "there is 'tiny'", "model", "model_not_found"),
    ):
        response = await post(http, "rerank", **{**ASKED, **changes})
        assert (response.status_code, message in error(response)) == (status, True), response.text
        assert (response.json()["error"]["param"], response.json()["error"]["code"]) == (param, code)


async def test_a_document_that_exceeds_the_window_is_refused(http: httpx.AsyncClient, engine: FusionEngine) -> None:
    window = engine.lm.context_window.tokens
    response = await post(http, "rerank", query=QUESTION, documents=["The ferry.", "x " * window])
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_the_token_is_asked_for_as_everywhere(backend: EngineBackend) -> None:
    async with client(make_app(backend, token="t")) as http:
        for path in ("/v1/rerank", "/rerank"):
            assert (await http.post(path, content=json.dumps(ASKED), headers=JSON)).status_code == 401
        allowed = await http.post("/rerank", content=json.dumps(ASKED), headers={**JSON, "authorization": "Bearer t"})
    assert allowed.status_code == 200


async def test_replicas_elsewhere_do_not_rerank(backend: EngineBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineBackend, "engine", None)
    async with client(make_app(backend)) as http:
        response = await post(http, "rerank", **ASKED)
    assert (response.status_code, "without --ray" in error(response)) == (404, True)


def test_a_client_that_goes_ends_its_request(engine: FusionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, sizes, rerank = threading.Event(), [], engine.rerank

    def leaving(query: str, texts: list[str]) -> Any:
        sizes.append(len(texts))
        gone.set()
        return rerank(query, texts)

    monkeypatch.setattr(engine, "rerank", leaving)
    reranked(engine, RerankRequest(query=QUESTION, documents=PASSAGES * AT_ONCE), gone.is_set)
    assert sizes == [AT_ONCE]
