"""A LangGraph agent with two tools over ten turns: each call of the model computes what is new in it, and no more.

In the middle everything is closed and opened again: the conversation comes from SQLite, tools' results from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.sqlite import SqliteSaver

from langchain_qcfuse import ChatQCFuse
from langchain_qcfuse.middleware import QCFuseMiddleware
from qcfuse_rag import LanguageModel, make_method, open_store
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES
from tests.support.tool_templates import teach, tool_model

TURNS = 10
CALL_TOKENS, ANSWER_TOKENS = 60, 6
MERGED = 2
"""Most tokens at the end of a prompt that are others once an answer follows, as `>` is before a line break."""


@tool
def search(about: Literal["ferry", "paint", "mill"]) -> str:
    """Search what the harbour has written."""
    return PASSAGES[["ferry", "paint", "mill"].index(about)]


@tool
def count(pier: Literal["north", "south"]) -> str:
    """Count the boats at a pier."""
    return f"{len(pier)} boats."


TOOLS = (search, count)


def asked_turns(messages: Collection[BaseMessage]) -> int:
    return sum(isinstance(message, HumanMessage) for message in messages)


@wrap_model_call
def call_then_answer(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    """Demand a call of one tool or the other in turn, then an answer: the model is too small to call by itself."""
    if isinstance(request.messages[-1], ToolMessage):
        return handler(request.override(model_settings={"max_tokens": ANSWER_TOKENS}))
    return handler(request.override(tool_choice=TOOLS[asked_turns(request.messages) % 2].name))


def converse(lm: LanguageModel, turns: int, checked: Collection[int], folder: Path) -> None:
    """Let an agent answer questions, and compare the answers to some of them with those without prefix reuse."""
    for begun in (0, turns // 2):
        engine = make_engine(lm, open_store(folder / "kv"), method=make_method("full"), prefix_bytes=1 << 30)
        chat = ChatQCFuse.from_engine(engine, max_tokens=CALL_TOKENS)
        with SqliteSaver.from_conn_string(str(folder / "turns.sqlite")) as saver:
            middleware = [call_then_answer, QCFuseMiddleware(chat)]
            agent = create_agent(chat, TOOLS, middleware=middleware, checkpointer=saver)
            for turn in range(begun, begun + turns // 2):
                question = {"messages": [HumanMessage(f"Who has key {turn}?")]}
                messages = agent.invoke(question, {"configurable": {"thread_id": "harbour"}})["messages"]
        engine.close()
    assert [type(message) for message in messages] == [HumanMessage, AIMessage, ToolMessage, AIMessage] * turns

    answers = [message for message in messages if isinstance(message, AIMessage)]
    assert [[call["name"] for call in answer.tool_calls] for answer in answers] == [["count"], [], ["search"], []] * (
        turns // 2
    )
    usages = [answer.usage_metadata for answer in answers]
    told = [(usage["input_tokens"], usage["input_token_details"]["cache_read"]) for usage in usages if usage]
    assert len(told) == 2 * turns
    assert told[0][1] == told[turns][1] == 0, "full prefill reads nothing from the store"
    for index, ((before, _), (tokens, reused)) in enumerate(pairwise(told), 1):
        assert index == turns or before - MERGED <= reused < tokens
    assert [reused for _, reused in told] == [a.response_metadata["fusion"]["prefix_tokens"] for a in answers]

    store = open_store(folder / "kv")
    plain = ChatQCFuse.from_engine(make_engine(lm, store, method=make_method("full")))
    for turn in checked:
        asked, answered = messages[: 4 * turn + 3], messages[4 * turn + 3]
        expected = plain.bind_tools(TOOLS).invoke(asked, max_tokens=ANSWER_TOKENS)
        assert expected.usage_metadata["input_token_details"]["cache_read"] == 0
        assert (answered.content, answered.tool_calls) == (expected.content, expected.tool_calls)
        called = plain.bind_tools(TOOLS, tool_choice=asked[-1].name).invoke(asked[:-2], max_tokens=CALL_TOKENS)
        assert called.tool_calls[0]["args"] == asked[-2].tool_calls[0]["args"]
    again = ChatQCFuse.from_engine(make_engine(lm, store, prefix_bytes=0))
    report = again.bind_tools(TOOLS).invoke(messages[:-1], max_tokens=1).response_metadata["fusion"]
    assert len(report["lookups"]) >= 1
    assert all(lookup["hit"] for lookup in report["lookups"]), "results of tools are in the store"
    again.engine.close()


@pytest.mark.slow
def test_every_call_reuses_the_calls_before(tmp_path: Path) -> None:
    converse(tool_model(window=8192), TURNS, range(TURNS), tmp_path)


@pytest.mark.real
@pytest.mark.slow
def test_every_call_of_a_real_model_reuses_the_calls_before(smollm2_folder: str, tmp_path: Path) -> None:
    lm = LanguageModel.load(smollm2_folder, device="cpu")
    teach(lm.tokenizer, "hermes")
    converse(lm, 4, (3,), tmp_path)
