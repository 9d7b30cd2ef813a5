"""Requests may ask for full prefill, and for an explanation of how their prompt was computed."""

from __future__ import annotations

import json

import httpx
import pytest

from qcfuse_rag import FusionEngine, LanguageModel, SamplingParams, make_method
from qcfuse_rag.monitoring.explain import explain_prefill
from tests.server.test_redact import SECRETS, Troubled
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES, QUESTION
from tests.support.serving import ask, chunks_of, error, serving


@pytest.fixture(autouse=True)
def warmed(engine: FusionEngine) -> None:
    engine.warm(PASSAGES)


async def test_a_request_for_full_prefill_takes_nothing_from_the_store(
    http: httpx.AsyncClient, engine: FusionEngine
) -> None:
    body = (await ask(http, method="full")).json()
    prompt, params = engine.prompt(QUESTION, PASSAGES), SamplingParams(max_new_tokens=12)
    expected = engine.generate(prompt, params, method=make_method("full"))
    assert body["choices"][0]["message"]["content"] == expected.text
    assert (body["fusion"]["method"], body["fusion"]["rows"]) == ("full", len(prompt))
    assert body["fusion"]["reused_tokens"] == 0
    assert (await ask(http)).json()["fusion"]["reused_tokens"] > 0
    assert "method" in error(await ask(http, method="epic"))


async def test_an_explanation_is_what_the_page_of_explain_shows(http: httpx.AsyncClient, engine: FusionEngine) -> None:
    body = (await ask(http, explain=True)).json()
    prompt = engine.prompt(QUESTION, PASSAGES)
    done = engine.prefill(prompt)
    scores = None if done.scores is None else done.scores.mean
    expected = explain_prefill(engine.lm.tokenizer, prompt, done.report, scores)
    assert scores is not None
    assert done.report.selected
    explanation = body["explanation"]
    assert explanation["sections"] == json.loads(json.dumps(expected["sections"]))
    assert explanation["score"] == expected["score"] is not None
    assert "recomputed" in {outcome for section in explanation["sections"] for outcome, _ in section["pieces"]}
    assert {stage["name"] for stage in explanation["stages"]} == {"load", "probe", "select", "recompute"}


async def test_a_stream_ends_with_the_explanation(http: httpx.AsyncClient) -> None:
    whole = (await ask(http, explain=True)).json()["explanation"]
    for options in (None, {"include_usage": True}):
        response = await ask(http, explain=True, stream=True, stream_options=options)
        chunks = chunks_of(response)
        assert chunks[-1]["explanation"]["sections"] == whole["sections"]
        assert [chunk for chunk in chunks if chunk.get("usage")] == chunks[-2:-1] * (options is not None)


async def test_only_requests_that_ask_get_an_explanation(http: httpx.AsyncClient) -> None:
    for explain in (None, False):
        assert "explanation" not in (await ask(http, explain=explain)).json()
    assert "explain" in error(await ask(http, explain="why"))


async def test_an_explanation_withholds_what_the_report_does(llama: LanguageModel) -> None:
    async with serving(make_engine(llama, Troubled())) as http:
        response = await ask(http, explain=True)
    assert "cannot be reached." in response.text
    assert not any(secret in response.text for secret in SECRETS)
