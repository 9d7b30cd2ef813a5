"""What clients of OpenAI's API get, by OpenAI's own client: chat, text completions, models."""

from __future__ import annotations

import asyncio
import time
from typing import Any, ClassVar

import httpx
import pytest

from qcfuse_rag import FusionEngine, LanguageModel, SamplingParams
from qcfuse_rag.generation.completion import content_logprobs
from qcfuse_rag.server.backend import EngineBackend, next_seed
from qcfuse_rag.server.protocol.chat_request import ChatRequest
from qcfuse_rag.server.protocol.events import Piece
from tests.support import serving
from tests.support.engines import make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION
from tests.support.serving import ask, post
from tests.support.tool_templates import LOOK_UP, tool_model

openai = pytest.importorskip("openai")

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
TEXT = f"{PASSAGES[0]}\n\n{PASSAGES[1]}\n\n{QUESTION}"


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tool_model()


@pytest.fixture
def engine(lm: LanguageModel) -> FusionEngine:
    return make_warmed_engine(lm)


@pytest.fixture
def limits() -> dict[str, Any]:
    return {"most_tokens": 600, "max_requests": 12}


@pytest.fixture
def api(http: httpx.AsyncClient) -> Any:
    return openai.AsyncOpenAI(api_key="any", base_url="http://here/v1", http_client=http, max_retries=0)


@pytest.fixture
def ascii_only(engine: FusionEngine) -> dict[str, float]:
    """Biases to tokens of letters: else a random model's bytes are mostly no text."""
    decode, vocabulary = engine.lm.tokenizer.decode, engine.lm.model.get_input_embeddings().num_embeddings
    tokens = [token for token in range(vocabulary) if decode([token]).isascii() and decode([token]).isalpha()]
    return {str(token): 100.0 for token in tokens}


async def chunks_of(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


class TestLogprobs:
    async def test_they_are_the_engines(self, api: Any, engine: FusionEngine, ascii_only: dict[str, float]) -> None:
        done = await api.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=9, logprobs=True, top_logprobs=3, logit_bias=ascii_only
        )
        turns, bias = [{"role": "user", "content": QUESTION}], tuple((int(k), v) for k, v in ascii_only.items())
        params = SamplingParams(max_new_tokens=9, logprobs=3, logit_bias=bias)
        expected = engine.generate(engine.prompt_from_text(turns), params)
        assert expected.logprobs is not None
        content = done.choices[0].logprobs.content
        assert [entry.model_dump() for entry in content] == content_logprobs(expected.logprobs, engine.lm.tokenizer)
        assert "".join(entry.token for entry in content) == done.choices[0].message.content
        assert [len(entry.top_logprobs) for entry in content] == [3] * 9

    @pytest.mark.parametrize("fidelity", ["fast", "exact"])
    async def test_a_stream_has_the_same_in_pieces(self, api: Any, fidelity: str) -> None:
        asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 9, "logprobs": True, "top_logprobs": 2}
        asked["extra_body"] = {"fidelity": fidelity}
        whole = await api.chat.completions.create(**asked)
        chunks = await chunks_of(await api.chat.completions.create(**asked, stream=True))
        pieces = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
        streamed = [entry for piece in pieces for entry in piece.content]
        assert streamed == whole.choices[0].logprobs.content

    async def test_an_end_token_is_no_content(self, api: Any, engine: FusionEngine) -> None:
        end = engine.lm.tokenizer.eos_token_id
        done = await api.chat.completions.create(
            model="tiny", messages=MESSAGES, logprobs=True, logit_bias={str(end): 100}
        )
        assert done.choices[0].finish_reason == "stop"
        assert done.choices[0].logprobs.content == []
        assert done.usage.completion_tokens == 1

    @pytest.mark.slow
    async def test_tool_calls_have_them_too(self, api: Any) -> None:
        asked = {"model": "tiny", "messages": MESSAGES, "logprobs": True, "tools": [LOOK_UP], "max_tokens": 200}
        whole = await api.chat.completions.create(**asked, tool_choice="required")
        assert whole.choices[0].message.tool_calls
        chunks = await chunks_of(await api.chat.completions.create(**asked, tool_choice="required", stream=True))
        streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
        assert streamed == whole.choices[0].logprobs.content != []

    async def test_without_the_field_there_are_none(self, api: Any) -> None:
        done = await api.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2)
        assert done.choices[0].logprobs is None


class TestSeveralAnswers:
    ASKED: ClassVar[dict[str, Any]] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 1.5}

    async def test_each_has_the_next_seed_and_the_prompt_counts_once(self, api: Any) -> None:
        alone = [await api.chat.completions.create(**self.ASKED, seed=seed) for seed in (5, 6, 7)]
        together = await api.chat.completions.create(**self.ASKED, seed=5, n=3)
        assert [choice.index for choice in together.choices] == [0, 1, 2]
        texts = [choice.message.content for choice in together.choices]
        assert texts == [completion.choices[0].message.content for completion in alone]
        assert len(set(texts)) == 3
        assert together.usage.prompt_tokens == alone[0].usage.prompt_tokens
        assert together.usage.completion_tokens == sum(completion.usage.completion_tokens for completion in alone)
        assert together.usage.total_tokens == together.usage.prompt_tokens + together.usage.completion_tokens

    async def test_the_later_answers_reuse_the_prompt(self, api: Any, engine: FusionEngine) -> None:
        reports: list[Any] = []
        engine.prefixes.limit_bytes = 10**8
        engine.observe(reports.append)
        await api.chat.completions.create(**self.ASKED, n=4, extra_body={"documents": PASSAGES})
        length = reports[0].prompt_tokens
        assert [report.prefix_tokens for report in reports] == [0, *[length - 1] * 3]
        assert [report.rows for report in reports[1:]] == [1] * 3

    async def test_a_stream_names_the_answer_of_each_piece(self, api: Any) -> None:
        whole = await api.chat.completions.create(**self.ASKED, seed=5, n=3)
        stream = await api.chat.completions.create(
            **self.ASKED, seed=5, n=3, stream=True, stream_options={"include_usage": True}
        )
        texts, roles, ends = {}, {}, {}
        *chunks, last = await chunks_of(stream)
        for chunk in chunks:
            (choice,) = chunk.choices
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            roles.setdefault(choice.index, choice.delta.role)
            ends[choice.index] = choice.finish_reason
        assert list(texts.values()) == [choice.message.content for choice in whole.choices]
        assert roles == {0: "assistant", 1: "assistant", 2: "assistant"}
        assert ends == {0: "length", 1: "length", 2: "length"}
        assert (last.choices, last.usage) == ([], whole.usage)
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        assert len(chunks) > 9

    @pytest.mark.slow
    async def test_each_takes_a_place(self, http: httpx.AsyncClient, backend: EngineBackend) -> None:
        full = await asyncio.gather(*(ask(http, n=8, temperature=1, max_tokens=4) for _ in range(2)))
        assert sorted(response.status_code for response in full) == [200, 429]
        assert (await ask(http, n=8, temperature=1)).status_code == 200, "the places are free again"

    async def test_a_reader_who_goes_ends_all(self, backend: EngineBackend) -> None:
        asked = ChatRequest(messages=MESSAGES, n=5, temperature=1, max_tokens=400)
        events = backend.answer(asked)
        async for event in events:
            if isinstance(event, Piece) and event.index == 1:
                break
        await events.aclose()
        scheduler = backend._handle.scheduler
        for _ in range(4000):
            if scheduler.idle:
                break
            await asyncio.sleep(0.005)
        assert scheduler.idle

    def test_seeds_stay_in_64_bits(self) -> None:
        assert [next_seed(seed, 3) for seed in (None, 4, -1, 2**63 - 1)] == [None, 7, 2, -(2**63) + 2]


class TestTextCompletions:
    async def test_passages_in_the_text_are_reused(self, api: Any, engine: FusionEngine) -> None:
        expected = engine.generate(engine.prompt_from_text(TEXT), SamplingParams(max_new_tokens=16))
        assert expected.usage.reused_tokens > 0
        done = await api.completions.create(model="tiny", prompt=TEXT)
        (choice,) = done.choices
        assert (choice.text, choice.finish_reason, choice.index) == (expected.text, "length", 0)
        assert (done.object, done.id[:5]) == ("text_completion", "cmpl-")
        assert done.usage.completion_tokens == 16, "the default of this interface"
        assert done.usage.prompt_tokens == len(engine.prompt_from_text(TEXT))
        assert done.usage.prompt_tokens_details.cached_tokens == expected.usage.reused_tokens

    async def test_a_stream_is_the_answer_in_pieces(self, api: Any) -> None:
        whole = await api.completions.create(model="tiny", prompt=TEXT, max_tokens=9)
        stream = await api.completions.create(
            model="tiny", prompt=TEXT, max_tokens=9, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = await chunks_of(stream)
        assert {chunk.object for chunk in chunks} == {"text_completion"}
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [*[None] * (len(chunks) - 1), "length"]
        assert len(chunks) > 2
        assert (last.choices, last.usage.total_tokens) == ([], whole.usage.total_tokens)

    async def test_several_prompts_have_several_answers_each(self, api: Any, engine: FusionEngine) -> None:
        prompts = [QUESTION, PASSAGES[2]]
        asked = {"model": "tiny", "max_tokens": 6, "temperature": 1.2}
        done = await api.completions.create(**asked, prompt=prompts, n=2, seed=1)
        alone = [
            await api.completions.create(**asked, prompt=prompt, seed=seed) for prompt in prompts for seed in (1, 2)
        ]
        assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in done.choices] == [completion.choices[0].text for completion in alone]
        assert done.usage.prompt_tokens == sum(len(engine.prompt_from_text(prompt)) for prompt in prompts)

    async def test_log_probabilities_are_columns(self, api: Any, ascii_only: dict[str, float]) -> None:
        asked = {"model": "tiny", "prompt": TEXT, "max_tokens": 7, "logprobs": 2, "logit_bias": ascii_only}
        (choice,) = (await api.completions.create(**asked)).choices
        columns = choice.logprobs
        assert "".join(columns.tokens) == choice.text
        assert [
            choice.text[at : at + len(token)] for at, token in zip(columns.text_offset, columns.tokens, strict=True)
        ]
        assert [tops[token] for tops, token in zip(columns.top_logprobs, columns.tokens, strict=True)] == (
            columns.token_logprobs
        )
        streamed = [c.choices[0].logprobs for c in await chunks_of(await api.completions.create(**asked, stream=True))]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            assert [value for piece in streamed for value in getattr(piece, name)] == getattr(columns, name)


async def test_models_are_as_openais(api: Any) -> None:
    (listed,) = (await api.models.list()).data
    assert (listed.id, listed.object, listed.owned_by) == ("tiny", "model", "qcfuse-rag")
    assert abs(listed.created - time.time()) < 600
    assert (await api.models.retrieve("tiny")) == listed


async def test_usage_is_null_until_the_last_piece_and_absent_if_not_asked_for(http: httpx.AsyncClient) -> None:
    for path, asked in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "x"})):
        for options in (None, {"include_usage": True}):
            response = await post(http, path, **asked, max_tokens=3, stream=True, stream_options=options)
            pieces = serving.chunks_of(response)
            if options is None:
                assert not any("usage" in piece for piece in pieces)
            else:
                assert [piece["usage"] is None for piece in pieces] == [*[True] * (len(pieces) - 1), False]
                assert pieces[-1]["choices"] == []
