"""The wording of a RAG prompt, and the types of messages and tools."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qcfuse_rag.errors import InvalidTemplate

Message = tuple[str, str]
"""`(role, content)` of a chat message; roles as in chat templates: system, user, assistant."""

Turn = Message | Mapping[str, Any]
"""A message, or a mapping with all fields that chat templates read: `role`, `content`, `tool_calls`, ..."""

Tool = Mapping[str, Any]
"""A tool as in chat templates: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


LABEL = re.compile(r"\S[^\n]*(?:\n|(?<=[:\uff1a>\]*]))(?=\s*\Z)")
"""Matches the line before a passage or a question, as `Question:`; on their line, only up to a colon or bracket."""

EDGES = re.compile(r"\A(?:[^\S\n]*\n)+|\s+\Z")


@dataclass(frozen=True)
class PromptTemplate:
    """The wording of a RAG prompt.

    Attributes:
        messages: chat messages; their contents have exactly one `{context}` and one `{question}`. Double literal
            braces, as in `str.format`.
        chunk: the format of a passage in the context; contains `{text}`. Put the separator of passages here, so that
            it is part of the chunk.
        chat_template_kwargs: further variables that the model's chat template reads, such as Qwen3's
            `{"enable_thinking": False}` or gpt-oss's `{"reasoning_effort": "low"}`; a request may override them.

    Raises:
        InvalidTemplate: if a placeholder is missing, repeated or unknown, or `chat_template_kwargs` is not JSON.
    """

    messages: tuple[Message, ...] = (
        ("system", "Answer the question from the passages. Give only the answer, as short as you can."),
        ("user", "Passages:\n\n{context}Question: {question}\nAnswer:"),
    )
    chunk: str = "{text}\n\n"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        fields = [field for _, content in self.messages for field in _fields(content)]
        if sorted(fields) != ["context", "question"]:
            raise InvalidTemplate(
                "a prompt template needs {context} and {question} once each and nothing else in braces, found: "
                + (", ".join("{" + field + "}" for field in fields) or "none")
            )
        if _fields(self.chunk) != ["text"]:
            raise InvalidTemplate("the template of a chunk needs {text} once and nothing else in braces")
        try:  # libraries keep the wording as JSON
            json.dumps(dict(self.chat_template_kwargs))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidTemplate(f"chat_template_kwargs has to be an object of JSON values: {error}") from error

    @property
    def turn_starts(self) -> tuple[str, ...]:
        """Strings by which an answer begins a new turn of this wording: lines with a label such as `Question:`."""
        pieces = (piece for _, content in self.messages for piece in string.Formatter().parse(content))
        labels = [LABEL.search(literal) for literal, field, _, _ in pieces if field is not None]
        found = dict.fromkeys(label[0] for label in labels if label is not None and re.search(r"\w", label[0]))
        return tuple(gap + label for label in found for gap in ("\n", "\n\n", "\n ", "\n\n "))

    def format_chunk(self, text: str) -> str:
        """Return a passage as the prompt and the warmed chunk contain it, without blank lines and blanks at its edges.

        Frameworks differ in these, and one text has one cache. The indentation of its first line stays.
        """
        return self.chunk.format(text=EDGES.sub("", text))


ANSWER_LABEL = re.compile(r"\w[\w ]{0,24}:")
QUESTION_LABEL = re.compile(r"(query|question)( \d+)?:(?=.)", re.IGNORECASE)


def turn_starts_of(text: str) -> tuple[str, ...]:
    """Return the `PromptTemplate.turn_starts` of a finished prompt that ends like `Query: ...` and a line `Answer:`."""
    *_, question, answer = ["", "", *filter(None, map(str.strip, text.rsplit("\n", 4)))]
    label = QUESTION_LABEL.match(question)
    return ("\n" + label[0], "\n\n" + label[0]) if label and ANSWER_LABEL.fullmatch(answer) else ()


ROLES = {"developer": "system", "human": "user", "ai": "assistant", "chatbot": "assistant", "model": "assistant"}
"""Roles of clients and frameworks, by the names that chat templates know; many templates drop an unknown role."""


def as_mapping(turn: Turn) -> Mapping[str, Any]:
    """Return a turn as chat templates take it."""
    message = turn if isinstance(turn, Mapping) else {"role": turn[0], "content": turn[1]}
    role = message.get("role")
    return {**message, "role": ROLES[role]} if role in ROLES else message


def _fields(template: str) -> list[str]:
    try:
        return [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise InvalidTemplate(f"{error} in {template!r}; write a literal brace twice") from error
