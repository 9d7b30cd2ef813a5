"""Tell the special tokens of a chat template from text in messages, tools and variables that is spelt like them.

A message may spell a special token, like a document written to end its turn and begin another. So may the schema of a
third party's tool, or a variable that a client sets. Special tokens of the template end turns; those that messages,
tools and variables spell are text. So they are marked before the template joins the messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from qcfuse_rag.errors import InvalidTemplate

MARK_CHARACTERS = (range(0x13000, 0x13430), range(0x20000, 0x2A6E0))
"""Hieroglyphs and rare Chinese characters; an unused one marks spelt special tokens while the template runs.

They are printable, so a template that prints a list or a dictionary prints them unchanged.
"""

ESCAPED_CHARACTER = re.compile(r"(?=(\\u[0-9a-fA-F]{4}\\u[0-9a-fA-F]{4}))")
"""Matches before characters above U+FFFF as JSON escapes, overlapping ones too."""

TOKENIZER_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
"""Parts of a tokenizer beside its vocabulary and its added tokens."""

INDENT = 4
"""Spaces by which some chat templates indent each level of a tool; they write one line for each leaf."""


def special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the special tokens of a tokenizer, which are no text."""
    return tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)


def tokenizer_copy(tokenizer: PreTrainedTokenizerBase, *, split_special: bool) -> Tokenizer:
    """Return a copy of a tokenizer without truncation and padding, which shares the vocabulary.

    Whether special tokens are recognised in text is a setting of the tokenizer, which threads share; so each setting
    has its copy. Copying the vocabulary as well would take half a second for 150,000 tokens.

    Args:
        tokenizer: the tokenizer.
        split_special: whether text that is spelt like a special token is plain text.
    """
    original = tokenizer.backend_tokenizer
    core = Tokenizer(original.model)
    for part in TOKENIZER_PARTS:
        if getattr(original, part) is not None:
            setattr(core, part, getattr(original, part))
    added = [token for _, token in sorted(original.get_added_tokens_decoder().items())]
    for special, tokens in groupby(added, key=attrgetter("special")):
        (core.add_special_tokens if special else core.add_tokens)(list(tokens))
    core.encode_special_tokens = split_special
    return core


@dataclass(frozen=True, slots=True)
class RenderedText:
    """Text for the model, with the ranges that are spelt like special tokens but are plain text.

    Attributes:
        text: the text.
        spelt: the ranges `start <= c < stop`, in order.
    """

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


class SpecialTokenMarker:
    """Mark what messages, tools and variables spell like special tokens, and remove the marks from the output.

    Args:
        special: the special tokens.
        turns: the messages.
        tools: the tools, whose names, descriptions and schemas are marked as well.
        kwargs: variables of the chat template, whose values are marked as well.

    Raises:
        InvalidTemplate: if a role spells a special token, or no unused character is left to mark with.
    """

    def __init__(
        self,
        special: Iterable[str],
        turns: Iterable[Mapping[str, Any]],
        tools: Iterable[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._turns, self._tools, self._kwargs = list(turns), list(tools), kwargs or {}
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        texts = "\0".join(_strings([self._turns, self._tools, self._kwargs]))
        self._spelt = pattern if pattern is not None and pattern.search(texts) else None  # None: nothing is spelt
        self._mark = ""
        if self._spelt is not None:
            used = {*texts, *map(str.lower, ESCAPED_CHARACTER.findall(texts))}
            signs = (sign for sign in map(chr, chain(*MARK_CHARACTERS)) if sign not in used)
            self._mark = next((sign for sign in signs if _escaped(sign) not in used), "")
            roles = [str(turn["role"]) for turn in self._turns]
            if not self._mark or any(map(self._spelt.search, roles)):
                raise InvalidTemplate(
                    f"special tokens in messages, tools or variables that cannot be told apart, of roles {set(roles)}"
                )

    @property
    def turns(self) -> list[Mapping[str, Any]]:
        """The messages, with a mark on both sides of each spelt special token."""
        if self._spelt is None:
            return self._turns
        return [{name: self._marked_field(name, value) for name, value in turn.items()} for turn in self._turns]

    @property
    def tools(self) -> list[Mapping[str, Any]]:
        """The tools, with a mark on both sides of each spelt special token."""
        return self._tools if self._spelt is None else [self._marked(tool) for tool in self._tools]

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The variables, with a mark on both sides of each special token that their values spell."""
        if self._spelt is None:
            return self._kwargs
        return {name: self._marked(value) for name, value in self._kwargs.items()}

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

    def _marked_field(self, name: str, value: Any) -> Any:
        """Mark one field of a message, but not its role or the types of its parts, which templates compare."""
        if name == "role":
            return value
        if isinstance(value, list | tuple):
            return [
                {key: inner if key == "type" else self._marked(inner) for key, inner in part.items()}
                if isinstance(part, Mapping)
                else self._marked(part)
                for part in value
            ]
        return self._marked(value)

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            assert self._spelt is not None
            return self._spelt.sub(lambda match: f"{self._mark}{match[0]}{self._mark}", value)
        if isinstance(value, Mapping):
            return {self._marked(name): self._marked(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(inner) for inner in value]
        return value


def estimate_length(value: Any) -> int:
    """Return the number of characters of a text, or about how many a template prints for messages or tools."""
    return sum(INDENT * depth + len(str(leaf)) for leaf, depth in _leaves(value))


def count_visible(value: Any) -> int:
    """Return the number of characters in a text, in messages or in tools that are no whitespace."""
    return sum(len("".join(leaf.split())) for leaf in _strings(value))


def _escaped(sign: str) -> str:
    """Return a character as JSON writes it in ASCII."""
    return json.dumps(sign)[1:-1]


def _strings(value: Any) -> Iterator[str]:
    return (leaf for leaf, _ in _leaves(value) if isinstance(leaf, str))


def _leaves(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield all values and mapping keys that contain no others, with their depths, in no order.

    Iterative, because nested generators would hand each leaf up through all levels.
    """
    stack = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, Mapping) and item:
            stack += [(inner, depth + 1) for pair in item.items() for inner in pair]
        elif isinstance(item, list | tuple) and item:
            stack += [(inner, depth + 1) for inner in item]
        else:
            yield item, depth
