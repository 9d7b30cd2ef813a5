"""A conversation as its chat template writes it, and which of it only looks like special tokens.

A message may spell one, as a document does that was written to end its turn and begin another. What the template writes
ends turns; what a message says is text. Which is which is known before they are joined, and kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qcfuse_rag.errors import InvalidTemplate

RARE = (range(0x13000, 0x13430), range(0x20000, 0x2A6E0))
"""Hieroglyphs and rare Chinese characters, one of which marks what a message spells while the template is at work.

They are printable: a template that prints a list or a dictionary writes them as they are.
"""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text in which some stretches are not special tokens, though they are spelt like them.

    Attributes:
        text: as the model is to read it.
        spelt: those stretches, `start <= c < stop`, in order.
    """

    text: str
    spelt: tuple[tuple[int, int], ...] = ()

    def part(self, start: int, stop: int) -> Rendered:
        """Return `start <= c < stop` of it."""
        inside = [(a - start, b - start) for a, b in self.spelt if start <= a and b <= stop]
        return Rendered(self.text[start:stop], tuple(inside))

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


class Spelling:
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
            self._mark = next((chr(one) for some in RARE for one in some if chr(one) not in said), "")
            roles = [str(turn["role"]) for turn in self._turns]
            if not self._mark or any(map(self._spelt.search, roles)):
                raise InvalidTemplate(f"special tokens in messages that cannot be told apart, of roles {set(roles)}")

    @property
    def turns(self) -> list[Mapping[str, Any]]:
        """The messages, marked where they spell something."""
        if self._spelt is None:
            return self._turns
        return [{name: self._part(name, value) for name, value in turn.items()} for turn in self._turns]

    def read(self, rendered: str) -> Rendered:
        """Take the marks out of what the template made of them."""
        if self._spelt is None:
            return Rendered(rendered)
        text, spelt = "", list[tuple[int, int]]()
        # A template may cut a message, and with it a mark from its pair.
        for piece in re.split(f"{self._mark}((?:{self._spelt.pattern}){self._mark})|{self._mark}", rendered):
            kept = (piece or "").removesuffix(self._mark)
            if kept != (piece or ""):
                spelt.append((len(text), len(text) + len(kept)))
            text += kept
        return Rendered(text, tuple(spelt))

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


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for inner in pair for text in _strings(inner))
    elif isinstance(value, list | tuple):
        yield from (text for inner in value for text in _strings(inner))
