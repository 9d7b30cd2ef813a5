r"""Read a text as atoms, so that two spellings of one text compare equal.

Atoms are words and single other characters; in scripts that write no spaces each character is an atom. The *gaps*
between atoms are whitespace, as such or escaped as `\n`. What clients rewrite is *folded* first: compatibility forms
(NFKC, Unicode Standard Annex 15), curly quotes, dashes, invisible characters and JSON's escapes.
"""

from __future__ import annotations

import json
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

UNSPACED = "\u0e00-\u0eff\u0f00-\u109f\u1780-\u17ff\u3005-\u30ff\u31f0-\u31ff\u3400-\u9fff\U00020000-\U0003ffff"
"""Thai, Lao, Tibetan, Burmese, Khmer, Japanese and Chinese, as ranges of a regular expression."""
ATOM = re.compile(rf"[{UNSPACED}]|(?:(?<!\\)|(?![nrt]))[^\W{UNSPACED}]+|(?!\\[nrt])[^\w\s]")

UNITS = re.compile(
    "[\x00-\x7f]?[\u0300-\u036f]{1,30}|[^\x00-\x7f]|`"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"""|\\(?:u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|["'/\\])"""
)
"""Matches what may be folded: a letter with its accents, one other character, or an escaped one."""
REWRITTEN = {
    **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u02bc`\u00b4", "'"),
    **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033", '"'),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
    **dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\ufeff", ""),
}
"""Characters that clients replace and NFKC keeps, and the characters that stand in their place."""

Rewriting = tuple[int, int, str]
"""A range `start <= c < stop` of a text as written, and what it is read as."""
Undo = tuple[int, int, int, str | None]
"""How to write a part of a folded text as it was: the atom that the part begins in, counted from the end of the atom
before it; the offset there; the length of the part; and how it was written, None in wide letters."""
WIDE = 0xFEE0
"""The distance of a wide letter from the usual one."""


def _read_as(unit: str) -> str:
    if unit[0] == "\\":
        unit = unit[1] if len(unit) == 2 else json.loads(f'"{unit}"')
    return REWRITTEN[unit] if unit in REWRITTEN else unicodedata.normalize("NFKC", unit)


@dataclass(frozen=True)
class Atoms:
    """The atoms of a text, folded.

    Attributes:
        text: the text as it is written.
        folded: the text as it is compared.
        rewritings: where both differ, in order.
        spans: start and end of each atom in `folded`.
    """

    text: str
    folded: str
    rewritings: list[Rewriting]
    spans: list[tuple[int, int]]

    @classmethod
    def of(cls, text: str) -> Atoms:
        """Split a text into atoms, in linear time."""
        units = () if text.isascii() and not {"`", "\\"} & set(text) else UNITS.finditer(text)
        rewritings = [(unit.start(), unit.end(), read) for unit in units if (read := _read_as(unit[0])) != unit[0]]
        pieces, end = list[str](), 0
        for start, stop, read in rewritings:
            pieces += [text[end:start], read]
            end = stop
        folded = "".join([*pieces, text[end:]])
        return cls(text, folded, rewritings, [atom.span() for atom in ATOM.finditer(folded)])

    def __len__(self) -> int:
        return len(self.spans)

    @cached_property
    def words(self) -> list[str]:
        """The atoms."""
        return [self.folded[start:stop] for start, stop in self.spans]

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """`[atoms + 1]`, where each atom ends in the text as written, after a 0."""
        ends = np.array([0, *(stop for _, stop in self.spans)], dtype=np.int64)
        return ends if self._written is None else np.append(0, self._written[np.maximum(ends[1:] - 1, 0)] + 1)

    @cached_property
    def characters_before(self) -> NDArray[np.int64]:
        """`[atoms + 1]`, how many characters of folded atoms stand before each atom, and in all."""
        return np.cumsum([0, *map(len, self.words)])

    def atom_characters(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for positions in the text as written how many characters of folded atoms stand before each."""
        if self._written is not None:
            positions = np.searchsorted(self._written, positions)
        return self._atom_characters[positions]

    def gaps(self) -> list[str]:
        """Return the whitespace before each atom, and behind the last one, as folded."""
        edges = [0, *(edge for span in self.spans for edge in span), len(self.folded)]
        return [self.folded[edges[i] : edges[i + 1]] for i in range(0, len(edges), 2)]

    def undo(self) -> list[Undo]:
        """Return how to write the folded text as it was; letters and digits that would tell of it are left out."""
        ends, undo, shift = [stop for _, stop in self.spans], list[Undo](), 0
        for start, stop, read in self.rewritings:
            place, written = start + shift, self.text[start:stop]
            atom = bisect_right(ends, place)
            is_wide = len(read) == len(written) == 1 and ord(written) - ord(read) == WIDE
            if is_wide or len(read) != 1 or not written.isalnum():
                how = None if is_wide else written
                undo.append((atom, place - (ends[atom - 1] if atom else 0), len(read), how))
            shift += len(read) - (stop - start)
        return undo

    @cached_property
    def _written(self) -> NDArray[np.int64] | None:
        """For each character of `folded` and its end the place in the text as written; None if all are the same."""
        if all(len(read) == stop - start for start, stop, read in self.rewritings):
            return None
        places, end = list[NDArray[np.int64]](), 0
        for start, stop, read in self.rewritings:
            places += [np.arange(end, start), np.full(len(read), start)]
            end = stop
        return np.concatenate([*places, np.arange(end, len(self.text) + 1)])

    @cached_property
    def _atom_characters(self) -> NDArray[np.int64]:
        inside = np.zeros(len(self.folded) + 1, dtype=np.int64)
        for start, stop in self.spans:
            inside[start + 1 : stop + 1] = 1
        return np.cumsum(inside)


def written_again(words: Sequence[str], gaps: Sequence[str], undo: Sequence[Undo], first: int) -> str:
    """Write atoms as they were: `words` from the atom `first` on, with their passage's `gaps` before each and `undo`.

    Raises:
        ValueError: if these do not fit each other.
    """
    pieces = [gap + word for gap, word in zip(gaps, words, strict=True)]
    starts = np.cumsum([0, *map(len, pieces)])
    text, written, end = "".join(pieces), list[str](), 0
    for atom, offset, length, original in undo:
        if first <= atom < first + len(words):
            start = int(starts[atom - first]) + offset
            if start < end:
                raise ValueError("rewritings overlap")
            end_before, end = end, start + length
            wide = "".join(chr(ord(read) + WIDE) for read in text[start:end])
            written += [text[end_before:start], wide if original is None else original]
    return "".join([*written, text[end:]])
