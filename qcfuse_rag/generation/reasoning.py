"""Separate the reasoning that a model writes before its answer from the answer.

The tags come from the tokenizer's response template. Without one, known tags are looked for in its chat template.
https://huggingface.co/docs/transformers/main/chat_response_parsing
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of the field for reasoning in response templates."""

TAG_KEYS = ("open", "open_pattern", "close", "close_pattern")
"""Keys of a field's tags in response templates."""

TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""Tags of reasoning at the start of an answer: of Qwen3, DeepSeek-R1, SmolLM3 and more; of Magistral; of Seed-OSS."""

HARMONY: dict[str, Any] = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": ["<|end|>", "<|return|>"]},
    },
}
"""The channels of gpt-oss. https://developers.openai.com/cookbook/articles/openai-harmony"""


class Delta(NamedTuple):
    """A piece of an answer: of its text, of its reasoning, or of both; reasoning is never part of the text."""

    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags of one model's reasoning.

    Attributes:
        response_template: in the form of transformers, with fields for reasoning and content.
        opening: the opening tag, which a prompt may end with; None if the response template finds that out itself.
    """

    response_template: Mapping[str, Any]
    opening: str | None = None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ReasoningFormat | None:
        """Return the format of a tokenizer's model; None if neither of its templates has one."""
        own = _reasoning_part(getattr(tokenizer, "response_template", None))
        if own is not None and _is_valid(tokenizer, own):
            return cls(own)
        chat_template = str(tokenizer.chat_template)
        if HARMONY["fields"]["reasoning_content"]["open"] in chat_template:
            return cls(HARMONY)
        for opening, closing in TAGS:
            if opening in chat_template and closing in chat_template:
                fields = {
                    "reasoning_content": {"open_pattern": rf"\A\s*{re.escape(opening)}", "close": closing},
                    "content": {},
                }
                return cls({"start_anchor_pattern": r"\A", "fields": fields}, opening)
        return None

    def has_tag_in(self, tokens: Iterable[str]) -> bool:
        """Return whether some of these tokens are in the tags."""
        tags = str(self.response_template).replace("\\", "")
        return any(token in tags for token in tokens)

    def reader(self, tokenizer: PreTrainedTokenizerBase, prompt_end: str) -> ReasoningReader:
        """Return a reader of one answer.

        Args:
            tokenizer: of the model.
            prompt_end: the end of the prompt as text, which may have opened the reasoning.
        """
        if self.opening is not None:
            prompt_end = self.opening if prompt_end.rstrip().endswith(self.opening) else ""
        return ReasoningReader(tokenizer.get_response_parser(dict(self.response_template), prefix=prompt_end))


class ReasoningReader:
    """Separates the reasoning of one streamed answer from its text, without the tags and the whitespace beside them.

    Args:
        parser: a `ResponseParser` of transformers, which has read the end of the prompt.
    """

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self._reasoning = _Trimmed()
        self._has_reasoning = self._has_text = False

    def push(self, piece: str) -> Delta:
        """Add a piece of the answer; return what is certain, often nothing."""
        return self._piece(self._parser.feed(piece))

    def finish(self) -> Delta:
        """Return what was held back, once the answer is finished."""
        return self._piece(self._parser.finalize()[1])

    def _piece(self, events: Iterable[Mapping[str, Any]]) -> Delta:
        text = reasoning = ""
        for event in events:
            if event["field"] == "content":
                text += event.get("text", "")
            else:
                reasoning += event.get("text", "")
                self._has_reasoning = True
        reasoning = self._reasoning.push(reasoning)
        if self._has_reasoning and not self._has_text:
            text = text.lstrip()
        self._has_text |= bool(text)
        return Delta(text, reasoning)


def _reasoning_part(response_template: Any) -> dict[str, Any] | None:
    """Return the tags of reasoning and content in a response template; None if it has none of reasoning.

    Tool calls stay part of the content, which `generation.tool_parsers` parse.
    """
    try:
        fields = {
            name: {key: value for key, value in field.items() if key in TAG_KEYS}
            for name, field in response_template["fields"].items()
            if name in (*REASONING_FIELDS, "content")
        }
        return {**response_template, "fields": fields} if fields.keys() - {"content"} else None
    except (TypeError, KeyError, AttributeError):  # there is no response template, or it is none
        return None


def _is_valid(tokenizer: PreTrainedTokenizerBase, response_template: dict[str, Any]) -> bool:
    """Return whether transformers takes a response template, which comes with a model's files."""
    try:
        tokenizer.get_response_parser(response_template, prefix="")
    except (ValueError, TypeError, KeyError, AttributeError):
        return False
    return True


class _Trimmed:
    """Streams a text without the whitespace around it."""

    def __init__(self) -> None:
        self._begun, self._held = False, ""

    def push(self, text: str) -> str:
        text = self._held + text if self._begun else text.lstrip()
        trimmed = text.rstrip()
        self._begun |= bool(trimmed)
        self._held = text[len(trimmed) :]
        return trimmed
