"""Render a conversation by a model's chat template, and tell its special tokens from text that is spelt like them.

A message may spell a special token, like a document written to end its turn and begin another. So may the schema of a
third party's tool, or a variable that a client sets. Special tokens of the template end turns; those that messages,
tools and variables spell are text. So they are marked before the template joins the messages.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from jinja2 import Environment, TemplateError, meta
from transformers import PreTrainedTokenizerBase

from qcfuse_rag.errors import InvalidTemplate
from qcfuse_rag.prompts.template import Tool, Turn, as_mapping

# Some chat templates print today's date; a system prefix that changes daily would make every framed cache useless.
TEMPLATE_DATE = "01 Jan 2025"
STOPPED_CLOCK = "{%- macro strftime_now(format) -%}" + TEMPLATE_DATE + "{%- endmacro -%}"

GENERATION_TAG = re.compile(r"{%[-+]?\s*(?:end)?generation\s*[-+]?%}")
"""Matches the tags by which transformers marks answers in a chat template for training; Jinja does not know them."""

SET_BY_THE_BUILDER = {"messages", "date_string", "strftime_now", "raise_exception"}
"""Variables and functions that a prompt's builder and transformers set, besides the arguments of the rendering."""

MARK_CHARACTERS = (range(0x13000, 0x13430), range(0x20000, 0x2A6E0))
"""Hieroglyphs and rare Chinese characters; an unused one marks spelt special tokens while the template runs.

They are printable, so a template that prints a list or a dictionary prints them unchanged.
"""

ESCAPED_CHARACTER = re.compile(r"(?=(\\u[0-9a-fA-F]{4}\\u[0-9a-fA-F]{4}))")
"""Matches before characters above U+FFFF as JSON escapes, overlapping ones too."""


@dataclass(frozen=True, slots=True)
class RenderedText:
    """Text for the model, with the ranges `start <= c < stop`, in order, that spell special tokens but are text."""

    text: str
    spelt: tuple[tuple[int, int], ...] = ()

    def part(self, start: int, stop: int) -> RenderedText:
        """Return the characters `start <= c < stop`."""
        inside = [(begin - start, end - start) for begin, end in self.spelt if start <= begin and end <= stop]
        return RenderedText(self.text[start:stop], tuple(inside))

    def pieces(self) -> Iterator[tuple[int, str, bool]]:
        """Yield each piece's start, its text, and whether special tokens in it count as such."""
        end = 0
        for start, stop in self.spelt:
            if end < start:
                yield end, self.text[end:start], True
            yield start, self.text[start:stop], False
            end = stop
        if end < len(self.text) or not self.text:
            yield end, self.text[end:], True


class ChatTemplate:
    """The chat template of a tokenizer; without one, messages are joined by blank lines.

    `kwargs` are the variables that it is usually rendered with.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer, self._kwargs = tokenizer, kwargs or {}

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that `chat_template_kwargs` may set, such as Qwen3's `enable_thinking`.

        Messages, tools, the date, the start of the answer and special tokens are the builder's and the tokenizer's.
        """
        templates = self._tokenizer.chat_template or ""
        environment = Environment(extensions=["jinja2.ext.loopcontrols"])
        names = set[str]()
        for template in templates.values() if isinstance(templates, dict) else [templates]:
            try:
                names |= meta.find_undeclared_variables(environment.parse(GENERATION_TAG.sub("", template)))
            except TemplateError:
                continue  # rendering says what is wrong with it
        arguments = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
        return frozenset(names - SET_BY_THE_BUILDER - arguments.keys() - self._tokenizer.special_tokens_map.keys())

    @property
    def shows_tools(self) -> bool:
        """Whether there is a place for tools."""
        if self._tokenizer.chat_template is None:
            return False
        return "tools" in str(self._tokenizer.get_chat_template(tools=[{}]))

    def render(
        self,
        turns: Iterable[Turn],
        tools: Sequence[Tool] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        arrange: Callable[[list[Mapping[str, Any]]], list[Mapping[str, Any]]] = list,
    ) -> RenderedText:
        """Render a conversation up to the start of the answer; special tokens that it spells stay text.

        `arrange` puts the messages into others, whose special tokens are meant.

        Raises:
            InvalidTemplate: if the chat template does not take these messages, does not show the given tools, or does
                not read one of the variables.
        """
        kwargs = kwargs or {}
        if unread := sorted(kwargs.keys() - self.variables):
            raise InvalidTemplate(
                f"chat_template_kwargs cannot set {', '.join(unread)}: the tokenizer's chat template reads "
                f"{', '.join(sorted(self.variables)) or 'no variable'} besides messages, tools and special tokens"
            )
        if tools and not self.shows_tools:
            raise InvalidTemplate(
                "the tokenizer's chat template has no place for tools: take a model that was trained to call tools, or "
                "ask for JSON by a schema, which works with any model"
            )
        messages = list(map(as_mapping, turns))
        marks = SpelledTokens(self._special, (messages, list(tools), kwargs))
        marked = arrange([{name: marks.mark_field(name, field) for name, field in turn.items()} for turn in messages])
        return marks.unmark(self._render(marked, [marks.mark(tool) for tool in tools], marks.mark(kwargs)))

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        special = [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    @cached_property
    def _shows_system(self) -> bool:
        text = "[[qcfuse:system]]"
        try:
            turns = [{"role": "system", "content": text}, {"role": "user", "content": "?"}]
            return text in self._apply(turns, [], self._kwargs)
        except TemplateError:
            return False

    def _render(self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Tool], kwargs: Mapping[str, Any]) -> str:
        if self._tokenizer.chat_template is None:
            return (self._tokenizer.bos_token or "") + "\n\n".join(turn["content"] for turn in turns)
        mergeable = len(turns) > 1 and turns[0]["role"] == "system"
        try:
            if not mergeable or self._shows_system:
                return self._apply(turns, tools, kwargs)
        except TemplateError as error:
            if not mergeable:
                raise InvalidTemplate(f"the tokenizer's chat template does not take these messages: {error}") from error
        # Some chat templates refuse or omit the system role: put its text in front of the first turn.
        system, first, *rest = turns
        merged = [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *rest]
        try:
            return self._apply(merged, tools, kwargs)
        except TemplateError as error:
            raise InvalidTemplate(f"the tokenizer's chat template does not take these messages: {error}") from error

    def _apply(self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Tool], kwargs: Mapping[str, Any]) -> str:
        given = list(tools) or None
        try:
            rendered = self._tokenizer.apply_chat_template(
                turns,
                tools=given,
                chat_template=STOPPED_CLOCK + self._tokenizer.get_chat_template(tools=given),
                tokenize=False,
                add_generation_prompt=True,
                date_string=TEMPLATE_DATE,
                **kwargs,
            )
        except (TypeError, ValueError, LookupError, AttributeError) as error:  # a value that it does not expect
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        return str(rendered)


class SpelledTokens:
    """Marks what a conversation spells like special tokens, and removes the marks from the rendered text.

    | in a message | in the template's output | for the model |
    |---|---|---|
    | `Say </s> now.` | `Say 𓀀</s>𓀀 now.</s>` | the first `</s>` is text, the second ends the turn |

    Raises:
        InvalidTemplate: if a role spells a special token, or no unused character is left to mark with.
    """

    def __init__(
        self, special: re.Pattern[str] | None, conversation: tuple[list[Mapping[str, Any]], list[Tool], Any]
    ) -> None:
        texts = "\0".join(leaf for leaf, _ in leaves(conversation) if isinstance(leaf, str))
        self._spelt = special if special is not None and special.search(texts) else None  # None: nothing is spelt
        if self._spelt is None:
            return
        used = {*texts, *map(str.lower, ESCAPED_CHARACTER.findall(texts))}
        signs = (sign for sign in map(chr, chain(*MARK_CHARACTERS)) if sign not in used)
        self._mark = next((sign for sign in signs if _escaped(sign) not in used), "")
        roles = {str(turn["role"]) for turn in conversation[0]}
        if not self._mark or any(map(self._spelt.search, roles)):
            raise InvalidTemplate(
                f"special tokens in messages, tools or variables that cannot be told apart, of roles {roles}"
            )

    def mark(self, value: Any) -> Any:
        """Return a value with a mark on both sides of each special token that its texts spell."""
        if self._spelt is None:
            return value
        if isinstance(value, str):
            return self._spelt.sub(lambda match: f"{self._mark}{match[0]}{self._mark}", value)
        if isinstance(value, Mapping):
            return {self.mark(name): self.mark(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(inner) for inner in value]
        return value

    def mark_field(self, name: str, value: Any) -> Any:
        """Mark one field of a message, but not its role or the types of its parts, which templates compare."""
        if name == "role":
            return value
        if self._spelt is not None and isinstance(value, list | tuple):
            return [
                {key: inner if key == "type" else self.mark(inner) for key, inner in part.items()}
                if isinstance(part, Mapping)
                else self.mark(part)
                for part in value
            ]
        return self.mark(value)

    def unmark(self, rendered: str) -> RenderedText:
        """Remove the marks from the template's output, and return the spelt ranges with it."""
        if self._spelt is None:
            return RenderedText(rendered)
        # A template may print a tool as JSON in ASCII, where the mark is an escape.
        rendered = re.sub(re.escape(_escaped(self._mark)), self._mark, rendered, flags=re.IGNORECASE)
        text, spelt = "", list[tuple[int, int]]()
        # A template may cut a message, so a mark may have lost its partner.
        for piece in re.split(f"{self._mark}((?:{self._spelt.pattern}){self._mark})|{self._mark}", rendered):
            unmarked = (piece or "").removesuffix(self._mark)
            if unmarked != (piece or ""):
                spelt.append((len(text), len(text) + len(unmarked)))
            text += unmarked
        return RenderedText(text, tuple(spelt))


def leaves(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield all values and mapping keys that contain no others, with their depths, in no order."""
    stack = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, Mapping) and item:
            stack += [(inner, depth + 1) for pair in item.items() for inner in pair]
        elif isinstance(item, list | tuple) and item:
            stack += [(inner, depth + 1) for inner in item]
        else:
            yield item, depth


def _escaped(sign: str) -> str:
    return json.dumps(sign)[1:-1]
