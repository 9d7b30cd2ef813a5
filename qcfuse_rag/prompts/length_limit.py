"""Refuse text that cannot fit the context window before it is tokenised.

A tokenizer takes seconds and gigabytes for a text of many megabytes. Its longest token bounds what a window can hold.
"""

from __future__ import annotations

from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.special_tokens import count_visible, estimate_length

CHEAP_CHARACTERS = 1 << 16
"""Text below this length is always tokenised, which takes milliseconds, so that errors can name its exact length."""


def require_short(builder: PromptBuilder, *parts: object) -> None:
    """Refuse text that no tokenizer could make short enough.

    Args:
        builder: supplies the longest token and the context window.
        *parts: texts, messages, tools and variables of the chat template.

    Raises:
        PromptTooLong: if there are more characters than a window of the longest tokens holds, counted as a template may
            write them. Whitespace counts apart, because tokens of whitespace are often the longest.
    """
    count = sum(map(estimate_length, parts))
    if builder.context_tokens is None or count < CHEAP_CHARACTERS:
        return
    most_visible = builder.context_tokens * builder.longest_visible_token
    if count > builder.context_tokens * builder.longest_token or (
        count > most_visible and sum(map(count_visible, parts)) > most_visible
    ):
        raise PromptTooLong(
            f"a prompt of about {count:,} characters cannot fit a context window of {builder.context_tokens:,} tokens"
        )
