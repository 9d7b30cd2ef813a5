"""Models that think, over HTTP: variables of their chat templates, and reasoning in a field of its own."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from qcfuse_rag import FusionEngine, Prompt
from qcfuse_rag.prompts.builder import PromptBuilder
from tests.support.engines import make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION
from tests.support.serving import ASKED, JSON, ask
from tests.support.thinking import answer_with, thinking_model
from tests.support.tool_templates import MOOR

ANSWER = "<think>\nHm.\n</think>\n\nYes."
CALL = '<tool_call>\n{"name": "moor", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def engine() -> FusionEngine:
    return make_warmed_engine(thinking_model())


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the texts of prompts."""
    seen: list[str] = []
    build, render = PromptBuilder.build, PromptBuilder.render

    def built(*args: Any, **kwargs: Any) -> Prompt:
        prompt = build(*args, **kwargs)
        seen.append("".join(segment.text for segment in prompt.segments))
        return prompt

    def rendered(*args: Any, **kwargs: Any) -> Any:
        seen.append((text := render(*args, **kwargs)).text)
        return text

    monkeypatch.setattr(PromptBuilder, "build", built)
    monkeypatch.setattr(PromptBuilder, "render", rendered)
    return seen


async def deltas(http: httpx.AsyncClient, **changes: Any) -> list[dict[str, Any]]:
    content = json.dumps({**ASKED, "stream": True, **changes})
    lines = (await http.post("/v1/chat/completions", content=content, headers=JSON)).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [choice["delta"] for event in events for choice in event["choices"]]


@pytest.mark.parametrize("documents", [PASSAGES, None])
async def test_a_request_sets_variables_of_the_chat_template(
    http: httpx.AsyncClient, prompts: list[str], documents: list[str] | None
) -> None:
    kwargs = {"enable_thinking": False, "reasoning_effort": "low"}
    body = (await ask(http, documents=documents, chat_template_kwargs=kwargs)).json()
    assert prompts[-1].startswith("<s>Effort: low.\n")
    assert prompts[-1].endswith("<assistant>\n<think>\n\n</think>\n\n")
    assert "reasoning_content" not in body["choices"][0]["message"]


@pytest.mark.parametrize(("kwargs", "effort"), [(None, "high"), ({"reasoning_effort": "none"}, "none")])
async def test_openais_effort_is_the_templates(
    http: httpx.AsyncClient, prompts: list[str], kwargs: dict[str, Any] | None, effort: str
) -> None:
    assert (await ask(http, reasoning_effort="high", chat_template_kwargs=kwargs)).status_code == 200
    assert prompts[-1].startswith(f"<s>Effort: {effort}.\n")


async def test_reasoning_has_a_field_of_its_own(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, ANSWER)
    choice = (await ask(http, max_tokens=100)).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert choice["finish_reason"] == "stop"
    streamed = await deltas(http, max_tokens=100)
    assert "".join(delta.get("reasoning_content", "") for delta in streamed) == "Hm."
    assert "".join(delta.get("content", "") for delta in streamed) == "Yes."
    last_thought = max(index for index, delta in enumerate(streamed) if "reasoning_content" in delta)
    assert not any(delta.get("content") for delta in streamed[:last_thought])


async def test_reasoning_before_a_call_comes_back_with_the_tools_result(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, prompts: list[str]
) -> None:
    answer_with(monkeypatch, f"<think>\nMoor first.\n</think>\n\n{CALL}")
    choice = (await ask(http, documents=None, tools=[MOOR], max_tokens=200)).json()["choices"][0]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"], choice["finish_reason"]) == (
        "Moor first.",
        None,
        "tool_calls",
    )
    assert message["tool_calls"][0]["function"]["name"] == "moor"
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Moored."}
    messages = [{"role": "user", "content": QUESTION}, message, result]
    assert (await ask(http, documents=None, tools=[MOOR], messages=messages)).status_code == 200
    reasoned = "<assistant>\n<think>\nMoor first.\n</think>\n\n"
    assert any(reasoned in text for text in prompts), "another text is that of the system prefix alone"
