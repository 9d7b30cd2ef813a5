r"""Find warmed passages in a finished text, for frameworks that join all passages into one string.

A text is read as *atoms*, words and single other characters, and the *gaps* between them: whitespace, as such or
escaped as `\n`. A passage is recognised by hashes of its atoms, so that a framework may strip, indent or quote it. Its
gaps are kept, so that the passage can be put together again as it was warmed. No text is kept.
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
"""Atoms in an anchor, whose hash suggests a passage; shorter passages are not found, and cost little to compute."""
PIECES = re.compile(r"((?:\\[nrt]|\s)+)|\w+|[^\w\s]")
SEPARATOR = "\0"


@dataclass(frozen=True, slots=True)
class PassageSignature:
    """What a passage is recognised by.

    Attributes:
        anchor: 64-bit hash of its first atoms.
        atoms: number of its atoms.
        name: digest of all its atoms.
        gaps: whitespace before, between and after the atoms, compressed.
    """

    anchor: int
    atoms: int
    name: str
    gaps: bytes


@dataclass(frozen=True, slots=True)
class PassageMatch:
    """A passage in a text: it takes the characters `start <= c < stop`, and was warmed as `text`."""

    start: int
    stop: int
    text: str


SignaturesByLength = dict[int, dict[str, PassageSignature]]
"""Signatures by number of atoms, then by name."""


def passage_signature(text: str, seed: int) -> PassageSignature | None:
    """Return the signature of a passage, or None if it is too short.

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
    return PassageSignature(_anchor_hash(joined[: starts[ANCHOR] - 1], seed), len(atoms), digest(joined), packed)


def find_passages(
    text: str, seed: int, known: Callable[[int], Iterable[PassageSignature]], name: Callable[[str], str] = str
) -> list[PassageMatch]:
    """Return the passages in a text, in order and without overlaps; of those with the same beginning the longest.

    Args:
        text: any text.
        seed: of the anchors' hashes.
        known: returns the signatures with an anchor; called for every atom of the text, but once for an anchor that
            has signatures.
        name: turns a digest of atoms into the name that signatures from `known` have.
    """
    atoms = list(_atoms(text))
    joined, starts = _joined(atoms)
    matches, position, by_anchor = list[PassageMatch](), 0, dict[int, SignaturesByLength]()
    while position + ANCHOR <= len(atoms):
        anchor = _anchor_hash(joined[starts[position] : starts[position + ANCHOR] - 1], seed)
        candidates = by_anchor.get(anchor) or _by_length(known(anchor))
        if candidates:
            by_anchor[anchor] = candidates
        signature = _longest(joined, starts, position, candidates, name) if candidates else None
        if signature is None:
            position += 1
            continue
        end = position + signature.atoms
        # The atoms of this text, with the whitespace that the passage had when it was warmed.
        gaps = zlib.decompress(signature.gaps).decode().split(SEPARATOR)
        warmed = gaps[0] + "".join(atom[0] + gap for atom, gap in zip(atoms[position:end], gaps[1:], strict=True))
        matches.append(PassageMatch(atoms[position][1], atoms[end - 1][2], warmed))
        position = end
    return matches


def atom_characters_before(text: str) -> list[int]:
    """Return for each position in a text, its end included, how many characters before it belong to atoms."""
    counts = [0] * (len(text) + 1)
    for _, start, stop in _atoms(text):
        counts[start + 1 : stop + 1] = [1] * (stop - start)
    return list(accumulate(counts))


def _atoms(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield text, start and end of each atom."""
    return ((piece[0], piece.start(), piece.end()) for piece in PIECES.finditer(text) if piece[1] is None)


def _joined(atoms: list[tuple[str, int, int]]) -> tuple[bytes, list[int]]:
    """Return the atoms as the bytes to be hashed, and where each begins there; last, where another one would."""
    words = [word.encode("utf-8", "surrogatepass") for word, _, _ in atoms]
    return SEPARATOR.encode().join(words), list(accumulate((len(word) + 1 for word in words), initial=0))


def _anchor_hash(joined: bytes, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(joined, seed) - (1 << 63)  # signed, as SQLite stores integers


def _by_length(signatures: Iterable[PassageSignature]) -> SignaturesByLength:
    """Return signatures by number of atoms, rising, and by name; of equal ones the first."""
    by_length: SignaturesByLength = {}
    for signature in sorted(signatures, key=lambda signature: signature.atoms):
        by_length.setdefault(signature.atoms, {}).setdefault(signature.name, signature)
    return by_length


def _longest(
    joined: bytes, starts: list[int], position: int, candidates: SignaturesByLength, name: Callable[[str], str]
) -> PassageSignature | None:
    """Return the longest passage that begins at an atom; the text is hashed once, however many candidates there are."""
    state, hashed, digests = hashlib.blake2b(digest_size=16), starts[position], list[tuple[str, int]]()
    for atoms in candidates:
        if position + atoms >= len(starts):
            break
        state.update(joined[hashed : starts[position + atoms] - 1])
        hashed = starts[position + atoms] - 1
        digests.append((state.hexdigest(), atoms))  # equals `digest` of all atoms so far
    for atoms_digest, atoms in reversed(digests):
        signature = candidates[atoms].get(name(atoms_digest))
        if signature is not None:
            return signature
    return None
