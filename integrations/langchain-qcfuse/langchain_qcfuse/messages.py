"""LangChain's messages as chat templates read them, and answers as LangChain's messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import Any

from langchain_core.documents import Document
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
from langchain_core.utils.json import parse_partial_json

from qcfuse_rag import Generation
from qcfuse_rag.generation.tool_parsers import ParsedResponse

MEDIA = {"image", "image_url", "input_image", "audio", "input_audio", "video", "file", "input_file"}
"""Blocks of messages that a model of text cannot see."""

ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}


def turn_of(message: BaseMessage) -> dict[str, Any]:
    """Return a message as a chat template reads it, with the tools it calls or answers for.

    Raises:
        ValueError: if there is something in it that is no text.
    """
    seen = MEDIA & {one.get("type") for one in blocks_of(message)}
    if seen:
        raise ValueError(f"the model reads text; leave out blocks of {', '.join(sorted(seen))}, or say what they show")
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
    plain = [one for one in blocks_of(message) if one.get("type") == "text-plain"]
    if any(not one.get("text") for one in plain):
        raise ValueError("a text-plain block needs its text: read what it refers to and give that")
    return [str(one["text"]) for one in plain]


def blocks_of(message: BaseMessage) -> list[dict[str, Any]]:
    """Return the blocks of a message that is made of some, but for bare strings."""
    blocks = message.content if isinstance(message.content, list) else []
    return [one for one in blocks if isinstance(one, dict)]


def texts_of(documents: Iterable[Document]) -> list[str]:
    """Return the texts of documents.

    Raises:
        TypeError: if they are no documents, as where one was given instead of a list.
    """
    given = list(documents)
    strange = [type(one).__name__ for one in given if not isinstance(one, Document)]
    if strange or isinstance(documents, str):
        raise TypeError(f"documents are a list of langchain_core's Document, not of {strange[0] if strange else 'str'}")
    return [one.page_content for one in given]


def answer_message(reply: ParsedResponse, generation: Generation, metadata: dict[str, Any]) -> AIMessage:
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


def last_chunk(rest: str, reply: ParsedResponse, generation: Generation, metadata: dict[str, Any]) -> AIMessageChunk:
    """Return the end of a stream: the calls, content that might have been one, and what the whole of it took."""
    chunks = [(call.name, json.dumps(call.arguments)) for call in reply.calls]
    chunks += [(None, _beyond_repair(call.text)) for call in reply.broken]
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


def _beyond_repair(text: str) -> str:
    """Return what is left of a broken call so that LangChain, which mends JSON, does not make a call of it."""
    try:
        mended = parse_partial_json(text)
    except ValueError:
        return text
    return json.dumps(text) if isinstance(mended, dict) else text


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex}"
