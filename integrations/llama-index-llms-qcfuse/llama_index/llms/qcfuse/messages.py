"""Convert LlamaIndex's messages to chat-template turns, and answers to LlamaIndex's messages."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms import types
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LogProb,
    MessageRole,
    TextBlock,
)

from qcfuse_rag import Generation

TEXT, THINKING, CITABLE = "text", "thinking", "citable"
"""Types of message blocks that a text model reads."""
SKIPPED = {"cache", "citation"}
"""Types of message blocks that add no text: a cache point for other APIs, and a source of text that is there."""

REASONING_KEY = "reasoning_content"
"""Key of `additional_kwargs` for reasoning, where a response has no blocks or llama-index-core has none for it."""

THINKING_BLOCK: Any = getattr(types, "ThinkingBlock", None)
"""None where llama-index-core has none, such as in 0.13.0."""


def turn_of(message: ChatMessage) -> dict[str, Any]:
    """Return a message as a turn of a chat template.

    Raises:
        ValueError: if it has a block of another type than text, such as an image or a tool call.
    """
    texts, reasoning_texts = list[str](), list[str]()
    for block in message.blocks:
        kind: str = block.block_type
        if kind == TEXT:
            texts.append(block.text)
        elif kind == THINKING:
            reasoning_texts.append(block.content or "")
        elif kind == CITABLE:
            texts += [turn_of(ChatMessage(role=message.role, blocks=block.content))["content"]]
        elif kind not in SKIPPED:
            raise ValueError(f"the model reads text; leave out blocks of the type {kind}")
    turn = {"role": message.role.value, "content": "\n".join(texts)}
    reasoning = "".join(reasoning_texts) or message.additional_kwargs.get(REASONING_KEY)
    return {**turn, REASONING_KEY: reasoning} if reasoning else turn


def reasoning_kwargs(reasoning: str, delta: str = "") -> dict[str, str]:
    """Return a response's `additional_kwargs` for reasoning so far and its newest piece, as agents read it."""
    kwargs = {REASONING_KEY: reasoning} if reasoning else {}
    return {**kwargs, "thinking_delta": delta} if delta else kwargs


def chat_response(completion: CompletionResponse) -> ChatResponse:
    """Return a completion as an assistant's message, with its reasoning as a `ThinkingBlock`."""
    reasoning = completion.additional_kwargs.get(REASONING_KEY)
    message = ChatMessage(role=MessageRole.ASSISTANT, content=completion.text)
    if reasoning and THINKING_BLOCK is not None:
        message.blocks = [THINKING_BLOCK(content=reasoning), TextBlock(text=completion.text)]
    elif reasoning:
        message.additional_kwargs = {REASONING_KEY: reasoning}
    return ChatResponse(
        message=message,
        delta=completion.delta,
        raw=completion.raw,
        logprobs=completion.logprobs,
        additional_kwargs=completion.additional_kwargs,
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
