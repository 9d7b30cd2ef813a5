"""Tools, agents and structured answers, over a tiny model whose chat template shows tools."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, SummarizationMiddleware, wrap_model_call
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from pydantic import BaseModel, Field

from langchain_qcfuse import ChatQCFuse, QCFuseVectorStore
from langchain_qcfuse.middleware import QCFuseMiddleware
from qcfuse_rag import MemoryStore
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES, QUESTION
from tests.support.thinking import thinking_model
from tests.support.tool_templates import LOOK_UP, tool_model

REPORT = "The tug Bellweather burned on the ninth of May, and nobody was hurt, because her crew was ashore to vote."
DOCUMENTS = [Document(page_content=text) for text in PASSAGES]


class Boat(BaseModel):
    """A boat."""

    afloat: bool
    masts: int | None = Field(ge=0, le=3)


class BoatDict(TypedDict):
    """A boat."""

    afloat: bool


@tool
def search_harbour(dry: bool) -> str:
    """Search what the harbour has written."""
    return "\n\n".join(PASSAGES)


@pytest.fixture
def chat() -> ChatQCFuse:
    return ChatQCFuse.from_engine(make_engine(tool_model(), MemoryStore()), max_tokens=120)


def reused(message: Any) -> int:
    count: int = message.response_metadata["fusion"]["reused_tokens"]
    return count


@pytest.mark.slow
async def test_a_required_call_all_four_ways(chat: ChatQCFuse) -> None:
    bound = chat.bind_tools([LOOK_UP], tool_choice="look_up")
    invoked, awaited = bound.invoke(QUESTION), await bound.ainvoke(QUESTION)
    streamed = list(bound.stream(QUESTION))
    astreamed = [chunk async for chunk in bound.astream(QUESTION)]
    messages = [invoked, awaited, sum(streamed[1:], streamed[0]), sum(astreamed[1:], astreamed[0])]
    for message in messages:
        assert message.content == ""
        (call,) = message.tool_calls
        assert call["name"] == "look_up"
        assert call["args"] == messages[0].tool_calls[0]["args"]  # type: ignore[union-attr]
        assert len(call["id"]) == 9
        assert message.usage_metadata["output_tokens"] > 0  # type: ignore[index]


def test_documents_stay_with_their_question_when_tools_have_answered(chat: ChatQCFuse) -> None:
    chat.warm(DOCUMENTS)
    chat.engine.prefixes.limit_bytes = 10**8
    call = AIMessage("", tool_calls=[{"name": "look_up", "args": {"boat": "tug", "year": 1990}, "id": "1"}])
    asked = [SystemMessage("Be brief."), HumanMessage(QUESTION)]
    first = chat.bind_tools([LOOK_UP]).invoke(asked, documents=DOCUMENTS)
    then = chat.bind_tools([LOOK_UP]).invoke(
        [*asked, call, ToolMessage("It sank.", tool_call_id="1")], documents=DOCUMENTS
    )
    assert reused(first) > 0
    assert first.usage_metadata is not None
    assert then.response_metadata["fusion"]["prefix_tokens"] >= first.usage_metadata["input_tokens"] - 4, (
        "the whole call before it, but the opening of the answer"
    )


def test_an_agent_answers_from_what_its_tool_found_and_the_store_has(chat: ChatQCFuse) -> None:
    chat.warm(DOCUMENTS)

    @wrap_model_call
    def search_once(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
        searched = any(isinstance(message, ToolMessage) for message in request.messages)
        return handler(request.override(tool_choice="none" if searched else "any"))

    agent = create_agent(chat, [search_harbour], middleware=[search_once])
    messages = agent.invoke({"messages": [HumanMessage(QUESTION)]})["messages"]
    assert [type(message) for message in messages] == [HumanMessage, AIMessage, ToolMessage, AIMessage]
    assert reused(messages[1]) == 0
    assert reused(messages[3]) > 0.8 * len(chat.engine.prompts.chunk_ids("\n\n".join(PASSAGES)))


async def test_a_middleware_passes_documents_and_warms_results(chat: ChatQCFuse) -> None:
    """Retrieved once for a question, documents stay before it when the tool has answered."""
    store = QCFuseVectorStore(InMemoryVectorStore(DeterministicFakeEmbedding(size=6)), chat)
    store.add_documents(DOCUMENTS)

    @tool(response_format="content_and_artifact")
    def fetch(dry: bool) -> tuple[str, list[Document]]:
        """Fetch a report."""
        return f"Found: {REPORT}", [Document(REPORT)]

    @wrap_model_call
    async def fetch_once(request: ModelRequest, handler: Callable[[ModelRequest], Awaitable[ModelResponse]]) -> Any:
        fetched = isinstance(request.messages[-1], ToolMessage)
        return await handler(request.override(tool_choice="none" if fetched else "any"))

    middleware = [fetch_once, QCFuseMiddleware(chat, store.as_retriever(search_kwargs={"k": 2}))]
    messages = (await create_agent(chat, [fetch], middleware=middleware).ainvoke({"messages": [("user", QUESTION)]}))[
        "messages"
    ]
    assert [type(message) for message in messages] == [HumanMessage, AIMessage, ToolMessage, AIMessage]
    lookups = [message.response_metadata["fusion"]["lookups"] for message in (messages[1], messages[3])]
    assert len(lookups[1]) > len(lookups[0]) == 2, "the retrieved documents, then the result as well"
    assert all(lookup["hit"] for each in lookups for lookup in each)

    agent = create_agent(chat, [], middleware=[QCFuseMiddleware(chat, store.as_retriever(search_kwargs={"k": 2}))])
    answer = agent.invoke({"messages": [HumanMessage(QUESTION)]})["messages"][-1]
    expected = chat.invoke(QUESTION, documents=store.similarity_search(QUESTION, k=2))
    assert answer.content == expected.content


@pytest.mark.parametrize("tools", [[], [search_harbour]])
def test_an_agent_answers_by_its_schema(chat: ChatQCFuse, tools: list[Any]) -> None:
    """With tools, the grammar allows a call or an object; the model that is not trained is kept from calling."""
    less = {chat.engine.lm.tokenizer.convert_tokens_to_ids("<"): -100.0}

    with pytest.MonkeyPatch.context() as patch:
        sampling = ChatQCFuse.sampling_params
        patch.setattr(
            ChatQCFuse,
            "sampling_params",
            lambda *args, **kwargs: replace(sampling(*args, **kwargs), logit_bias=tuple(less.items())),
        )
        state = create_agent(chat, tools, response_format=Boat).invoke({"messages": [("user", QUESTION)]})
    assert isinstance(state["structured_response"], Boat)
    assert [type(message) for message in state["messages"]] == [HumanMessage, AIMessage], "no tool was called for it"


def test_langchains_middleware_reads_the_profile(chat: ChatQCFuse) -> None:
    SummarizationMiddleware(chat, trigger=("fraction", 0.8))


def test_the_profile_says_what_the_model_can(chat: ChatQCFuse) -> None:
    profile = chat.profile
    assert profile is not None
    assert (profile["max_input_tokens"], profile["max_output_tokens"]) == (4096 - 120, 120)
    assert profile["tool_calling"]
    assert profile["structured_output"]
    assert not profile["reasoning_output"]
    assert ChatQCFuse(model="none", profile={"max_input_tokens": 5}).profile == {"max_input_tokens": 5}
    thinking = ChatQCFuse.from_engine(make_engine(thinking_model(), MemoryStore()))
    assert thinking.profile is not None
    assert thinking.profile["reasoning_output"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_structured_answers(chat: ChatQCFuse, method: Any) -> None:
    boat = chat.with_structured_output(Boat, method=method)
    assert isinstance(boat.invoke(QUESTION), Boat)
    assert isinstance(await boat.ainvoke(QUESTION), Boat)
    assert set(chat.with_structured_output(BoatDict, method=method).invoke(QUESTION)) == {"afloat"}
    raw = chat.with_structured_output(BoatDict, method=method, include_raw=True).invoke(QUESTION)
    assert raw["parsed"]["afloat"] in (True, False)
    assert isinstance(raw["raw"], AIMessage)
    assert raw["parsing_error"] is None


def test_structured_answers_are_given_from_documents(chat: ChatQCFuse) -> None:
    chat.warm(DOCUMENTS)
    raw = chat.with_structured_output(BoatDict, include_raw=True).invoke(QUESTION, documents=DOCUMENTS)
    assert all(lookup["hit"] for lookup in raw["raw"].response_metadata["fusion"]["lookups"])


def test_a_truncated_answer_is_an_error_with_its_text(chat: ChatQCFuse) -> None:
    raw = chat.with_structured_output(BoatDict, include_raw=True, max_tokens=2).invoke(QUESTION)
    assert raw["parsed"] is None
    assert "raise max_tokens" in str(raw["parsing_error"])
    assert raw["raw"].response_metadata["finish_reason"] == "length"
    cut = chat.bind_tools([LOOK_UP], tool_choice="any").invoke(QUESTION, max_tokens=40)
    assert cut.tool_calls == []
    assert "not JSON" in str(cut.invalid_tool_calls[0]["error"])


def test_a_truncated_stream_is_not_a_call(chat: ChatQCFuse) -> None:
    """LangChain repairs JSON as far as it can."""
    chunks = list(chat.bind_tools([LOOK_UP], tool_choice="any").stream(QUESTION, max_tokens=40))
    message = sum(chunks[1:], chunks[0])
    assert isinstance(message, AIMessageChunk)
    assert message.tool_calls == []
    assert len(message.invalid_tool_calls) == 1
    assert "look_up" in str(message.invalid_tool_calls[0]["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize(
    ("settings", "advice"), [({"max_tokens": 10}, "raise max_tokens"), ({"stop": [","]}, "`stop`")]
)
def test_half_an_object_is_never_an_answer(
    chat: ChatQCFuse, method: Any, settings: dict[str, Any], advice: str
) -> None:
    boat = chat.with_structured_output(Boat.model_json_schema(), method=method, **settings)
    with pytest.raises(OutputParserException, match=advice):
        boat.invoke(QUESTION)


def test_free_text_is_streamed_though_tools_are_offered(chat: ChatQCFuse) -> None:
    chunks = list(chat.bind_tools([LOOK_UP]).stream(QUESTION, max_tokens=24))
    assert all(isinstance(chunk, AIMessageChunk) for chunk in chunks)
    expected = chat.bind_tools([LOOK_UP]).invoke(QUESTION, max_tokens=24)
    assert "".join(str(chunk.content) for chunk in chunks) == expected.content
    assert len(chunks) > 4
