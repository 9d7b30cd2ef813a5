"""Convert LangChain's messages to chat-template turns, answers to messages, and documents to passages."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    InvalidToolCall,
    SystemMessage,
    ToolCall,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.utils.json import parse_partial_json

from qcfuse_rag import Generation
from qcfuse_rag.integrations import Delta, ParsedResponse, Passage

MEDIA = {"image", "image_url", "input_image", "audio", "input_audio", "video", "file", "input_file"}
"""Types of message blocks that a text model cannot read."""

REASONING_KEY = "reasoning_content"
"""Key of `additional_kwargs` that LangChain's `content_blocks` read as a `reasoning` block."""

ROLES = {
    HumanMessage: "user",
    AIMessage: "assistant",
    SystemMessage: "system",
    ToolMessage: "tool",
    FunctionMessage: "function",
}
"""The role of each class of messages; chunks of streams are subclasses."""


def turn_of(message: BaseMessage) -> dict[str, Any]:
    """Return a message as a turn of a chat template, with its reasoning and tool calls, or as a tool's result.

    Raises:
        ValueError: if it has a block of images, audio, video or files, or is no message of a conversation.
    """
    media = MEDIA & {block.get("type") for block in blocks_of(message)}
    if media:
        raise ValueError(f"the model reads text; leave out blocks of {', '.join(sorted(media))}, or describe them")
    turn: dict[str, Any] = {"role": _role_of(message), "content": str(message.text)}
    if isinstance(message, AIMessage) and (reasoning := reasoning_in(message)):
        turn["reasoning_content"] = reasoning
    if isinstance(message, AIMessage) and message.invalid_tool_calls:  # the model sees what it wrote
        turn["content"] += "".join(call["args"] or "" for call in message.invalid_tool_calls)
    if isinstance(message, AIMessage) and message.tool_calls:
        turn["tool_calls"] = [
            {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["args"]}}
            for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        turn |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return turn


def _role_of(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in ROLES.items():
        if isinstance(message, kind):
            return role
    raise ValueError(f"a {type(message).__name__} is no message for a model; leave it out")


def documents_in(message: BaseMessage) -> list[str]:
    """Return the texts of a message's `text-plain` blocks, in order.

    `message.text` does not contain them, so models that do not know these blocks do not see them.

    Raises:
        ValueError: if a block has no text, such as a block that refers to a file or a URL.
    """
    blocks = [block for block in blocks_of(message) if block.get("type") == "text-plain"]
    if any(not block.get("text") for block in blocks):
        raise ValueError("a text-plain block needs its text: read the file or URL and give its text")
    return [str(block["text"]) for block in blocks]


def reasoning_in(message: AIMessage) -> str:
    """Return the reasoning of an answer: of its `additional_kwargs`, or of its `reasoning` blocks."""
    blocks = [block for block in blocks_of(message) if block.get("type") == "reasoning"]
    return message.additional_kwargs.get(REASONING_KEY) or "".join(block.get("reasoning") or "" for block in blocks)


def blocks_of(message: BaseMessage) -> list[dict[str, Any]]:
    """Return a message's content blocks, without bare strings."""
    blocks = message.content if isinstance(message.content, list) else []
    return [block for block in blocks if isinstance(block, dict)]


def answer_message(reply: ParsedResponse, generation: Generation, metadata: dict[str, Any]) -> AIMessage:
    """Return a complete answer as a message."""
    return AIMessage(
        content=reply.content,
        additional_kwargs=_with_reasoning(reply.reasoning),
        tool_calls=[ToolCall(name=call.name, args=call.arguments, id=call.id) for call in reply.calls],
        invalid_tool_calls=[
            InvalidToolCall(name=None, args=call.text, id=None, error=call.reason) for call in reply.broken
        ],
        response_metadata=metadata,
        usage_metadata=usage_metadata(generation),
    )


def answer_chunk(piece: Delta) -> AIMessageChunk:
    """Return a piece of an answer as a chunk of a stream."""
    return AIMessageChunk(content=piece.text, additional_kwargs=_with_reasoning(piece.reasoning))


def last_chunk(rest: Delta, reply: ParsedResponse, generation: Generation, metadata: dict[str, Any]) -> AIMessageChunk:
    """Return the last chunk of a stream: what was not shown yet, tool calls, metadata and token counts."""
    chunks = [(call.name, json.dumps(call.arguments), call.id) for call in reply.calls]
    chunks += [(None, _unrepairable(call.text), None) for call in reply.broken]
    return AIMessageChunk(
        content=rest.text,
        additional_kwargs=_with_reasoning(rest.reasoning),
        tool_call_chunks=[
            tool_call_chunk(name=name, args=args, id=id_, index=index) for index, (name, args, id_) in enumerate(chunks)
        ],
        response_metadata=metadata,
        usage_metadata=usage_metadata(generation),
        chunk_position="last",
    )


def usage_metadata(generation: Generation) -> UsageMetadata:
    """Return token counts: `cache_read` counts reused prompt tokens, `cache_creation` computed prompt tokens."""
    usage = generation.usage
    return UsageMetadata(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        total_tokens=usage.input_tokens + usage.output_tokens,
        input_token_details=InputTokenDetails(
            cache_read=usage.reused_tokens, cache_creation=usage.input_tokens - usage.reused_tokens
        ),
    )


def _with_reasoning(reasoning: str) -> dict[str, Any]:
    return {REASONING_KEY: reasoning} if reasoning else {}


def _unrepairable(text: str) -> str:
    """Return the text of a broken call so that LangChain, which repairs JSON, cannot parse it as a call."""
    try:
        repaired = parse_partial_json(text)
    except ValueError:
        return text
    return json.dumps(text) if isinstance(repaired, dict) else text


SOURCE_KEY = "source"
"""Metadata key under which LangChain's loaders note what a document was read from."""


def passage_of(document: Document, source_key: str | None) -> Passage:
    """Return a document as a passage; its source is `source_key` in its metadata, else its id, else None."""
    named = document.metadata.get(source_key) if source_key is not None else None
    source = document.id if named in (None, "") else named
    return Passage(document.page_content, None if source is None else str(source), document.metadata)


def texts_of(documents: Iterable[Document]) -> list[str]:
    """Return the texts of documents.

    Raises:
        TypeError: if `documents` is not a list of documents, such as one document.
    """
    if isinstance(documents, str):
        raise TypeError("documents are a list of langchain_core's Document, not of str")
    documents = list(documents)
    others = [type(document).__name__ for document in documents if not isinstance(document, Document)]
    if others:
        raise TypeError(f"documents are a list of langchain_core's Document, not of {others[0]}")
    return [document.page_content for document in documents]
