"""Convert LlamaIndex's messages to chat-template turns, and answers to LlamaIndex's messages."""

from __future__ import annotations

import json
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from qcfuse_rag import Generation
from qcfuse_rag.integrations import ParsedResponse

TEXT, THINKING, CITABLE, TOOL_CALL = "text", "thinking", "citable", "tool_call"
"""Types of message blocks that a text model reads."""
SKIPPED = {"cache", "citation"}
"""Types of message blocks that add no text: a cache point for other APIs, and a source of text that is there."""

REASONING_KEY = "reasoning_content"
"""Key of `additional_kwargs` for reasoning, where a response has no blocks."""

INVALID_CALLS_KEY = "invalid_tool_calls"
"""Key of a response's `additional_kwargs` for the reasons why what it wrote as calls of tools is none."""


def turn_of(message: ChatMessage) -> dict[str, Any]:
    """Return a message as a turn of a chat template, with its reasoning and tool calls, or as a tool's result.

    Raises:
        ValueError: if it has a block that is not text, such as an image.
    """
    texts, reasoning_texts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for block in message.blocks:
        kind: str = block.block_type
        if kind == TEXT:
            texts.append(block.text)
        elif kind == THINKING:
            reasoning_texts.append(block.content or "")
        elif kind == CITABLE:
            texts += [turn_of(ChatMessage(role=message.role, blocks=block.content))["content"]]
        elif kind == TOOL_CALL:
            arguments = block.tool_kwargs  # other LLMs keep the text that they wrote
            arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
            function = {"name": block.tool_name, "arguments": arguments}
            calls.append({"type": "function", "id": block.tool_call_id, "function": function})
        elif kind not in SKIPPED:
            raise ValueError(f"the model reads text; leave out blocks of the type {kind}")
    turn: dict[str, Any] = {"role": message.role.value, "content": "\n".join(texts)}
    if reasoning := "".join(reasoning_texts) or message.additional_kwargs.get(REASONING_KEY):
        turn[REASONING_KEY] = reasoning
    if calls:
        turn["tool_calls"] = calls
    if message.role == MessageRole.TOOL:
        turn["tool_call_id"] = message.additional_kwargs.get("tool_call_id")
    return turn


def reasoning_kwargs(reasoning: str, delta: str = "") -> dict[str, str]:
    """Return a response's `additional_kwargs` for reasoning so far and its newest piece, as agents read it."""
    kwargs = {REASONING_KEY: reasoning} if reasoning else {}
    return {**kwargs, "thinking_delta": delta} if delta else kwargs


def broken_text(response: ParsedResponse) -> str:
    """Return what an answer wrote as calls of tools and is none; it stays text, so that the model sees it again."""
    return "".join(call.text for call in response.broken)


def answer_message(response: ParsedResponse) -> ChatMessage:
    """Return an answer as an assistant's message: its reasoning, its text and its calls, each in blocks."""
    blocks: list[ContentBlock] = [ThinkingBlock(content=response.reasoning)] if response.reasoning else []
    text = response.content + broken_text(response)
    if text or not response.calls:
        blocks.append(TextBlock(text=text))
    for call in response.calls:
        blocks.append(ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=call.arguments))
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks)


def completion_response(response: ChatResponse) -> CompletionResponse:
    """Return an answer to a conversation as a completion, which has no blocks."""
    return CompletionResponse(
        text=response.message.content or "",
        delta=response.delta,
        raw=response.raw,
        logprobs=response.logprobs,
        additional_kwargs=response.additional_kwargs,
    )


def logprobs_of(generation: Generation, tokenizer: Any) -> list[list[LogProb]] | None:
    """Return the likeliest tokens in the place of each token of an answer, or that token; None if it has none."""
    content = generation.content_logprobs(tokenizer)
    if content is None:
        return None
    return [
        [
            LogProb(token=token["token"], logprob=token["logprob"], bytes=token["bytes"])
            for token in entry["top_logprobs"] or [entry]
        ]
        for entry in content
    ]
