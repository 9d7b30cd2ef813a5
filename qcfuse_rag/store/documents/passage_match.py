r"""Find warmed passages in a finished text, as frameworks hand over that have joined everything into one string.

A text is read as *atoms*, words and single other characters, and the *gaps* between them: whitespace, written out or
escaped as `\n`. A passage is known by hashes of its atoms, so a framework may strip it, indent it or quote it; and by
its gaps, so that with the atoms of the text it can be put together again as it was warmed. No text is kept.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import xxhash

from qcfuse_rag.models.fingerprint import digest

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


ByLength = dict[int, dict[str, Traits]]
"""Passages by how many atoms they have, and by name."""


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
    joined, starts = _joined(atoms)
    packed = zlib.compress(SEPARATOR.join(gaps).encode(), 9)
    return Traits(_anchor(joined[: starts[ANCHOR] - 1], seed), len(atoms), digest(joined), packed)


def locate(
    text: str, seed: int, known: Callable[[int], Iterable[Traits]], name: Callable[[str], str] = str
) -> list[Found]:
    """Return the passages in a text, in order and apart from each other; of those that begin alike the longest.

    Args:
        text: anything.
        seed: of the anchors' hashes.
        known: the passages of an anchor; called for every place in the text, but once for an anchor that has some.
        name: turns a digest into the name that `known` gives passages.
    """
    atoms = list(_atoms(text))
    joined, starts = _joined(atoms)
    found, at, alike = list[Found](), 0, dict[int, ByLength]()
    while at + ANCHOR <= len(atoms):
        anchor = _anchor(joined[starts[at] : starts[at + ANCHOR] - 1], seed)
        candidates = alike.get(anchor) or _by_length(known(anchor))
        if candidates:
            alike[anchor] = candidates
        match = _longest(joined, starts, at, candidates, name) if candidates else None
        if match is None:
            at += 1
            continue
        last = at + match.atoms
        gaps = zlib.decompress(match.gaps).decode().split(SEPARATOR)
        warmed = gaps[0] + "".join(atom[0] + gap for atom, gap in zip(atoms[at:last], gaps[1:], strict=True))
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


def _joined(atoms: list[tuple[str, int, int]]) -> tuple[bytes, list[int]]:
    """Return atoms as they are hashed, and where in it each begins; at the end, where one more would."""
    words = [word.encode("utf-8", "surrogatepass") for word, _, _ in atoms]
    return SEPARATOR.encode().join(words), list(accumulate((len(word) + 1 for word in words), initial=0))


def _anchor(joined: bytes, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(joined, seed) - (1 << 63)  # as SQLite counts


def _by_length(passages: Iterable[Traits]) -> ByLength:
    """Return passages by how many atoms they have, the shortest first, and by their names; of equal ones the first."""
    found: ByLength = {}
    for one in sorted(passages, key=lambda one: one.atoms):
        found.setdefault(one.atoms, {}).setdefault(one.name, one)
    return found


def _longest(
    joined: bytes, starts: list[int], at: int, candidates: ByLength, name: Callable[[str], str]
) -> Traits | None:
    """Return the longest passage that stands at an atom. However many there are, the text is hashed once."""
    state, begin, digests = hashlib.blake2b(digest_size=16), starts[at], list[tuple[str, dict[str, Traits]]]()
    for atoms, named in candidates.items():
        if at + atoms >= len(starts):
            break
        state.update(joined[begin : starts[at + atoms] - 1])
        begin = starts[at + atoms] - 1
        digests.append((state.hexdigest(), named))  # as `digest` of all so far
    return next((named[one] for told, named in reversed(digests) if (one := name(told)) in named), None)
