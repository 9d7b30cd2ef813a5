"""A chain with a message history computes what is new in each turn."""

from __future__ import annotations

import pytest
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessageChunk,
    InvalidToolCall,
    RemoveMessage,
    SystemMessageChunk,
    ToolMessageChunk,
)
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables.history import RunnableWithMessageHistory

from langchain_qcfuse import ChatQCFuse
from langchain_qcfuse.messages import turn_of
from qcfuse_rag import LanguageModel, MemoryStore
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES


def test_every_turn_reuses_the_turns_before_of_its_own_session(lm: LanguageModel) -> None:
    engine = make_engine(lm, MemoryStore(), prefix_bytes=1 << 30)
    chat = ChatQCFuse.from_engine(engine, max_tokens=6)
    prompt = ChatPromptTemplate.from_messages(
        [("system", " ".join(PASSAGES)), MessagesPlaceholder("history"), ("human", "{input}")]
    )
    plain = prompt | ChatQCFuse.from_engine(make_engine(lm, engine.store), max_tokens=6)
    histories = {session: InMemoryChatMessageHistory() for session in "ab"}
    chain = RunnableWithMessageHistory(
        prompt | chat, lambda session: histories[session], input_messages_key="input", history_messages_key="history"
    )
    before = dict.fromkeys(histories, 0)
    for turn in range(10):
        for session in histories:
            message = chain.invoke({"input": f"{session} {turn}?"}, config={"configurable": {"session_id": session}})
            usage = message.usage_metadata
            assert usage is not None
            reused = usage["input_token_details"]["cache_read"]
            assert usage["input_tokens"] > reused >= before[session] - 8
            assert reused == message.response_metadata["fusion"]["prefix_tokens"]
            before[session] = usage["input_tokens"]
            earlier = histories[session].messages[:-2]
            assert message.content == plain.invoke({"history": earlier, "input": f"{session} {turn}?"}).content
    engine.close()


@pytest.mark.parametrize(
    ("message", "role"),
    [
        (AIMessageChunk("Orla"), "assistant"),
        (HumanMessageChunk("Who?"), "user"),
        (SystemMessageChunk("Be brief."), "system"),
        (ToolMessageChunk("7", tool_call_id="1"), "tool"),
        (ChatMessage("Be brief.", role="developer"), "developer"),
    ],
)
def test_chunks_of_a_stream_are_turns_like_whole_messages(message: BaseMessage, role: str) -> None:
    assert turn_of(message)["role"] == role


def test_what_is_no_message_is_refused_and_a_broken_call_is_shown_as_it_was_written() -> None:
    with pytest.raises(ValueError, match="RemoveMessage is no message"):
        turn_of(RemoveMessage(id="1"))
    broken = InvalidToolCall(name=None, args='{"name": "look', id="1", error="not JSON")
    assert turn_of(AIMessage("", invalid_tool_calls=[broken]))["content"] == '{"name": "look'
