"""Messages of LangChain as turns of a conversation."""

from __future__ import annotations

import pytest
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

from langchain_qcfuse.messages import turn_of


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
