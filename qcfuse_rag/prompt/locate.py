r"""Find warmed passages in a finished text, as frameworks hand over that have joined everything into one string.

A text is read as *atoms*, words and single other characters, and the *gaps* between them: whitespace, written out or
escaped as `\n`. A passage is known by hashes of its atoms, so a framework may strip it, indent it or quote it; and by
its gaps, so that with the atoms of the text it can be put together again as it was warmed. No text is kept.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import xxhash

from qcfuse_rag.model.fingerprint import digest

ANCHOR = 12
"""Atoms by whose hash a passage is suspected; shorter passages are not found, and cost little to compute."""
PIECES = re.compile(r"((?:\\[nrt]|\s)+)|\w+|[^\w\s]")
SEPARATOR = "\0"


@dataclass(frozen=True, slots=True)
class Traits:
    """What a passage is recognised by.

    Attributes:
        anchor: 64 bits over its first atoms.
        atoms: how many it has.
        name: digest of all of them.
        gaps: what stands before, between and behind them, packed.
    """

    anchor: int
    atoms: int
    name: str
    gaps: bytes


@dataclass(frozen=True, slots=True)
class Found:
    """A passage in a text: it takes the characters `start <= c < stop` there, and was warmed as `text`."""

    start: int
    stop: int
    text: str


def traits(text: str, seed: int) -> Traits | None:
    """Return what to recognise a passage by; None if it is too short.

    Args:
        text: the passage.
        seed: of the anchor's hash.
    """
    atoms = list(_atoms(text))
    if len(atoms) < ANCHOR:
        return None
    edges = [0, *(edge for _, start, stop in atoms for edge in (start, stop)), len(text)]
    gaps = [text[edges[i] : edges[i + 1]] for i in range(0, len(edges), 2)]
    words = [word for word, _, _ in atoms]
    packed = zlib.compress(SEPARATOR.join(gaps).encode(), 9)
    return Traits(_anchor(words[:ANCHOR], seed), len(words), _name(words), packed)


def locate(
    text: str, seed: int, known: Callable[[int], Iterable[Traits]], name: Callable[[str], str] = str
) -> list[Found]:
    """Return the passages in a text, in order and apart from each other; of those that begin alike the longest.

    Args:
        text: anything.
        seed: of the anchors' hashes.
        known: the passages of an anchor; called for every place in the text.
        name: turns a digest into the name that `known` gives passages.
    """
    atoms = list(_atoms(text))
    words, found, at = [word for word, _, _ in atoms], list[Found](), 0
    while at + ANCHOR <= len(words):
        candidates = sorted(known(_anchor(words[at : at + ANCHOR], seed)), key=lambda one: -one.atoms)
        match = next((one for one in candidates if name(_name(words[at : at + one.atoms])) == one.name), None)
        if match is None:
            at += 1
            continue
        last = at + match.atoms
        gaps = zlib.decompress(match.gaps).decode().split(SEPARATOR)
        warmed = gaps[0] + "".join(word + gap for word, gap in zip(words[at:last], gaps[1:], strict=True))
        found.append(Found(atoms[at][1], atoms[last - 1][2], warmed))
        at = last
    return found


def places(text: str) -> list[int]:
    """Return for each place in a text, its end included, how many characters before it belong to atoms."""
    counts = [0] * (len(text) + 1)
    for _, start, stop in _atoms(text):
        counts[start + 1 : stop + 1] = [1] * (stop - start)
    return list(accumulate(counts))


def _atoms(text: str) -> Iterator[tuple[str, int, int]]:
    return ((piece[0], piece.start(), piece.end()) for piece in PIECES.finditer(text) if piece[1] is None)


def _anchor(words: list[str], seed: int) -> int:
    unsigned = xxhash.xxh3_64_intdigest(SEPARATOR.join(words).encode("utf-8", "surrogatepass"), seed)
    return unsigned - (1 << 63)  # as SQLite counts


def _name(words: list[str]) -> str:
    return digest(SEPARATOR.join(words).encode("utf-8", "surrogatepass"))
