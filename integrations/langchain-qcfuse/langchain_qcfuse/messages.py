"""LangChain's messages as chat templates read them, and answers as LangChain's messages."""

from __future__ import annotations

import json
import uuid
from typing import Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    InvalidToolCall,
    ToolCall,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk

from qcfuse_rag import Generation, ToolReply

ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}


def turn_of(message: BaseMessage) -> dict[str, Any]:
    """Return a message as a chat template reads it, with the tools it calls or answers for."""
    role = message.role if isinstance(message, ChatMessage) else ROLES.get(message.type, message.type)
    turn: dict[str, Any] = {"role": role, "content": str(message.text)}
    if isinstance(message, AIMessage) and message.tool_calls:
        turn["tool_calls"] = [
            {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["args"]}}
            for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        turn |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return turn


def documents_in(message: BaseMessage) -> list[str]:
    """Return the documents a message carries as `text-plain` content blocks, in order.

    Their text is no part of the message's own, so models that do not know them do not see them.

    Raises:
        ValueError: if a block has no text, such as one that names a file or an address.
    """
    blocks = message.content if isinstance(message.content, list) else []
    plain = [one for one in blocks if isinstance(one, dict) and one.get("type") == "text-plain"]
    if any(not one.get("text") for one in plain):
        raise ValueError("a text-plain block needs its text: read what it refers to and give that")
    return [str(one["text"]) for one in plain]


def answer_message(reply: ToolReply, generation: Generation, metadata: dict[str, Any]) -> AIMessage:
    """Return a whole answer."""
    return AIMessage(
        content=reply.content,
        tool_calls=[ToolCall(name=call.name, args=call.arguments, id=_call_id()) for call in reply.calls],
        invalid_tool_calls=[
            InvalidToolCall(name=None, args=call.text, id=_call_id(), error=call.reason) for call in reply.broken
        ],
        response_metadata=metadata,
        usage_metadata=usage_metadata(generation),
    )


def last_chunk(rest: str, reply: ToolReply, generation: Generation, metadata: dict[str, Any]) -> AIMessageChunk:
    """Return the end of a stream: the calls, content that might have been one, and what the whole of it took."""
    chunks = [(call.name, json.dumps(call.arguments)) for call in reply.calls]
    chunks += [(None, call.text) for call in reply.broken]
    return AIMessageChunk(
        content=rest,
        tool_call_chunks=[
            tool_call_chunk(name=name, args=args, id=_call_id(), index=index)
            for index, (name, args) in enumerate(chunks)
        ],
        response_metadata=metadata,
        usage_metadata=usage_metadata(generation),
        chunk_position="last",
    )


def usage_metadata(generation: Generation) -> UsageMetadata:
    """Return token counts: `cache_read` are reused prompt tokens, `cache_creation` those computed."""
    usage = generation.usage
    return UsageMetadata(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        total_tokens=usage.input_tokens + usage.output_tokens,
        input_token_details=InputTokenDetails(
            cache_read=usage.reused_tokens, cache_creation=usage.input_tokens - usage.reused_tokens
        ),
    )


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex}"
