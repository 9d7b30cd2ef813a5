"""A conversation as its chat template writes it, and which of it only looks like special tokens.

A message may spell one, as a document does that was written to end its turn and begin another. What the template writes
ends turns; what a message says is text. Which is which is known before they are joined, and kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from qcfuse_rag.errors import InvalidTemplate

RARE = (range(0x13000, 0x13430), range(0x20000, 0x2A6E0))
"""Hieroglyphs and rare Chinese characters, one of which marks what a message spells while the template is at work.

They are printable: a template that prints a list or a dictionary writes them as they are.
"""

INDENT = 4
"""Spaces by which some chat templates indent each level of a tool, one line for each of its parts."""


@dataclass(frozen=True, slots=True)
class RenderedText:
    """Text in which some stretches are not special tokens, though they are spelt like them.

    Attributes:
        text: as the model is to read it.
        spelt: those stretches, `start <= c < stop`, in order.
    """

    text: str
    spelt: tuple[tuple[int, int], ...] = ()

    def part(self, start: int, stop: int) -> RenderedText:
        """Return `start <= c < stop` of it."""
        inside = [(a - start, b - start) for a, b in self.spelt if start <= a and b <= stop]
        return RenderedText(self.text[start:stop], tuple(inside))

    def pieces(self) -> Iterator[tuple[int, str, bool]]:
        """Yield where each piece begins, its text, and whether special tokens in it are meant."""
        at = 0
        for start, stop in self.spelt:
            if at < start:
                yield at, self.text[at:start], True
            yield start, self.text[start:stop], False
            at = stop
        if at < len(self.text) or not self.text:
            yield at, self.text[at:], True


class SpecialTokenMarker:
    """Marks what messages spell like special tokens, before a chat template joins them, and finds it behind it.

    Args:
        special: the special tokens.
        turns: the messages.
        others: what else the template writes, such as tools.

    Raises:
        InvalidTemplate: if a role spells one, or there is no character to mark with.
    """

    def __init__(self, special: Iterable[str], turns: Iterable[Mapping[str, Any]], others: object = ()) -> None:
        self._turns = list(turns)
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        spelt = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        said = "\0".join(_strings(self._turns))
        self._spelt = spelt if spelt is not None and spelt.search(said) else None  # which is to say: nothing is spelt
        self._mark = ""
        if self._spelt is not None:
            said += "\0".join(_strings(others))
            taken = set(said)
            self._mark = next((sign for sign in map(chr, chain(*RARE)) if sign not in taken), "")
            roles = [str(turn["role"]) for turn in self._turns]
            if not self._mark or any(map(self._spelt.search, roles)):
                raise InvalidTemplate(f"special tokens in messages that cannot be told apart, of roles {set(roles)}")

    @property
    def turns(self) -> list[Mapping[str, Any]]:
        """The messages, marked where they spell something."""
        if self._spelt is None:
            return self._turns
        return [{name: self._part(name, value) for name, value in turn.items()} for turn in self._turns]

    def read(self, rendered: str) -> RenderedText:
        """Take the marks out of what the template made of them."""
        if self._spelt is None:
            return RenderedText(rendered)
        text, spelt = "", list[tuple[int, int]]()
        # A template may cut a message, and with it a mark from its pair.
        for piece in re.split(f"{self._mark}((?:{self._spelt.pattern}){self._mark})|{self._mark}", rendered):
            kept = (piece or "").removesuffix(self._mark)
            if kept != (piece or ""):
                spelt.append((len(text), len(text) + len(kept)))
            text += kept
        return RenderedText(text, tuple(spelt))

    def _part(self, name: str, value: Any) -> Any:
        """Mark one part of a message; what kind of part it is, templates compare."""
        if name == "role":
            return value
        if isinstance(value, list | tuple):
            return [
                {inner: said if inner == "type" else self._marked(said) for inner, said in one.items()}
                if isinstance(one, Mapping)
                else self._marked(one)
                for one in value
            ]
        return self._marked(value)

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            assert self._spelt is not None
            return self._spelt.sub(lambda found: f"{self._mark}{found[0]}{self._mark}", value)
        if isinstance(value, Mapping):
            return {self._marked(name): self._marked(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(inner) for inner in value]
        return value


def estimate_length(value: Any) -> int:
    """Return how many characters a text has, or about how many a chat template may write of messages or tools."""
    return sum(INDENT * depth + len(str(leaf)) for leaf, depth in _leaves(value))


def _strings(value: Any) -> Iterator[str]:
    return (leaf for leaf, _ in _leaves(value) if isinstance(leaf, str))


def _leaves(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield all that holds nothing else, names and empty lists too, and how deep it is; in no order.

    In one pass however deep that is: generators within generators hand each leaf up through all levels.
    """
    left = [(value, 0)]
    while left:
        one, depth = left.pop()
        if isinstance(one, Mapping) and one:
            left += [(inner, depth + 1) for pair in one.items() for inner in pair]
        elif isinstance(one, list | tuple) and one:
            left += [(inner, depth + 1) for inner in one]
        else:
            yield one, depth
