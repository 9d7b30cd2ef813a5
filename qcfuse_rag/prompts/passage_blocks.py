"""A passage as blocks of a few atoms, each with the hashes by which it is found and compared in a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from qcfuse_rag.prompts.atoms import Atoms

BLOCK = 12
"""Most atoms in a block: a cut costs about half of one, a changed word one."""
PARAGRAPH = 4
"""Fewest atoms of a block that ends at a blank line, so that what follows a header begins a block."""
ANCHOR = 8
"""Atoms in an anchor; shorter passages are not found, and cost little to compute."""
HEADER, PER_BLOCK = 8, 15
"""Bytes of a passage's blocks."""
MULTIPLIER = 0x9E3779B97F4A7C15
"""Odd, so that a sum of its powers is a rolling hash modulo 2**64."""

Offsets = Sequence[tuple[int, int]]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TokenisedText:
    """A text, its atoms, and its tokens with the characters that each takes."""

    atoms: Atoms
    ids: NDArray[np.uint32]
    offsets: Integers

    @classmethod
    def of(cls, text: str, ids: Sequence[int], offsets: Offsets) -> TokenisedText:
        """Read a text."""
        pairs = np.array(offsets, dtype=np.int64).reshape(-1, 2)
        return cls(Atoms.of(text), np.array(ids, dtype="<u4"), pairs)

    def first_token(self, atoms: Integers) -> Integers:
        """Return for each atom the first token that ends behind the atom before it."""
        return np.searchsorted(self.offsets[:, 1], self.atoms.ends[atoms], side="right")

    def places(self, start: int, stop: int, atom: int) -> list[tuple[int, int, int]]:
        """Return for some tokens the characters of atoms, from one atom on, before each and its end; and its id."""
        characters = self.atoms.atom_characters(self.offsets[start:stop]) - self.atoms.characters_before[atom]
        return [
            (*edges, token) for edges, token in zip(characters.tolist(), self.ids[start:stop].tolist(), strict=True)
        ]

    def hashed(self, start: int, stop: int, seed: int) -> int:
        """Return a 64-bit hash of some token ids."""
        return xxhash.xxh3_64_intdigest(self.ids[start:stop].tobytes(), seed)

    def anchors(self, seed: int) -> NDArray[np.uint32]:
        """Return the anchor at each atom that has enough atoms behind it; never 0."""
        known: dict[str, int] = {}
        for word in self.atoms.words:
            if word not in known:
                known[word] = xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass"), seed)
        words = np.array([known[word] for word in self.atoms.words], dtype=np.uint64)
        total = np.zeros(max(0, len(words) - ANCHOR + 1), dtype=np.uint64)
        for place in range(ANCHOR if len(total) else 0):
            total = total * np.uint64(MULTIPLIER) + words[place : place + len(total)]
        high: NDArray[np.uint64] = total >> np.uint64(32)
        return np.maximum(high, 1).astype(np.uint32)


@dataclass(frozen=True, eq=False)
class PassageBlocks:
    """The blocks of a passage.

    Attributes:
        lead: tokens of its chunk before them.
        n_tokens: tokens of its chunk.
        anchors: `[blocks]`, 0 where too few atoms follow.
        sizes: `[blocks]`, atoms of each.
        counts: `[blocks]`, tokens of each.
        hashes: `[blocks]`, of their ids.
    """

    lead: int
    n_tokens: int
    anchors: NDArray[np.uint32]
    sizes: NDArray[np.uint8]
    counts: NDArray[np.uint16]
    hashes: NDArray[np.uint64]

    def to_bytes(self) -> bytes:
        """Return the blocks as bytes: lead and number of tokens, then the four arrays."""
        header = np.array([self.lead, self.n_tokens], dtype="<u4")
        return b"".join(part.tobytes() for part in (header, self.anchors, self.sizes, self.counts, self.hashes))

    @classmethod
    def from_bytes(cls, data: bytes) -> PassageBlocks | None:
        """Return the blocks; None if the bytes are not those of blocks."""
        count, left = divmod(len(data) - HEADER, PER_BLOCK)
        if count < 1 or left:
            return None
        lead, n_tokens = (int(number) for number in np.frombuffer(data, "<u4", 2))
        parts, end = list[NDArray[Any]](), HEADER
        for dtype in ("<u4", "u1", "<u2", "<u8"):
            parts.append(np.frombuffer(data, dtype, count, end))
            end += parts[-1].nbytes
        fits = lead + int(parts[2].sum()) <= n_tokens and int(parts[1].min()) > 0
        return cls(lead, n_tokens, *parts) if fits else None

    @cached_property
    def ends(self) -> Integers:
        """`[blocks]`, the atom behind each block."""
        return np.cumsum(self.sizes, dtype=np.int64)

    @cached_property
    def token_starts(self) -> Integers:
        """`[blocks]`, the first token of each block in the chunk."""
        return self.lead + np.cumsum(self.counts, dtype=np.int64) - self.counts


def anchors_and_sizes(data: bytes) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Return these two of a passage's blocks as bytes; none if there are too few bytes."""
    count = max(0, len(data) - HEADER) // PER_BLOCK
    return np.frombuffer(data, "<u4", count, HEADER), np.frombuffer(data, "u1", count, HEADER + 4 * count)


def blocks_of(chunk: TokenisedText, first: int, last: int, seed: int) -> PassageBlocks | None:
    """Return the blocks of a passage, whose atoms are `first <= a < last` of its chunk; None if it is too short."""
    if last - first < ANCHOR:
        return None
    starts, anchors = np.array(_block_starts(chunk.atoms.gaps(), first, last)), chunk.anchors(seed)
    edges = np.append(starts, last)
    tokens = chunk.first_token(edges)
    if int(np.diff(tokens).max()) >= 1 << 16:
        return None
    return PassageBlocks(
        int(tokens[0]),
        len(chunk.ids),
        np.where(starts + ANCHOR <= last, anchors[np.minimum(starts, len(anchors) - 1)], 0).astype("<u4"),
        np.diff(edges).astype("u1"),
        np.diff(tokens).astype("<u2"),
        np.array([chunk.hashed(start, stop, seed) for start, stop in pairwise(tokens.tolist())], dtype="<u8"),
    )


def _block_starts(gaps: list[str], first: int, last: int) -> list[int]:
    starts = [first]
    for atom in range(first + 1, last):
        size = atom - starts[-1]
        if size == BLOCK or (size >= PARAGRAPH and gaps[atom].count("\n") > 1):
            starts.append(atom)
    return starts
