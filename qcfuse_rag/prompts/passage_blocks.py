"""A passage as blocks of a few atoms, each with the hashes by which it is found and compared in a text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby, pairwise
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
        pairs = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets))
        return cls(Atoms.of(text), np.array(ids, dtype="<u4"), pairs.reshape(-1, 2))

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
        """Return a 64-bit hash of some token ids; others with the same hash cannot be constructed."""
        key = seed.to_bytes(8)
        return int.from_bytes(hashlib.blake2b(self.ids[start:stop].tobytes(), digest_size=8, key=key).digest())

    def anchors(self, seed: int) -> NDArray[np.uint32]:
        """Return the anchor at each atom that has enough atoms behind it; never 0."""
        words = self.atoms.words
        known = {word: xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass"), seed) for word in set(words)}
        hashes = np.fromiter(map(known.__getitem__, words), np.uint64, len(words))
        total = np.zeros(max(0, len(words) - ANCHOR + 1), dtype=np.uint64)
        for place in range(ANCHOR if len(total) else 0):
            total = total * np.uint64(MULTIPLIER) + hashes[place : place + len(total)]
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


MIN_RUN = 3
"""Fewest equal tokens in a row that are worth placing."""

Run = tuple[int, int, int]
"""Equal tokens in a row: where they begin in the text and in the passage's chunk, and how many they are."""

Rewrite = Callable[[int, Sequence[str]], tuple[TokenisedText, int] | None]
"""Writes atoms, the first of which has a number in the passage, as they were when the passage was warmed.

Returns that text and the number of its atoms before them; None if it is not known how they were written.
"""


@dataclass(eq=False)
class Alignment:
    """A passage whose first atom would be the atom `begin` of a text; `places` are atoms with anchors of its blocks."""

    text: TokenisedText
    passage: PassageBlocks
    begin: int
    places: Integers
    seed: int
    equal: set[int] = field(default_factory=set)

    def runs(self, taken: NDArray[np.bool_], rewrite: Rewrite) -> list[Run]:
        """Return the runs of equal tokens in blocks none of whose atoms is taken, and take these atoms."""
        blocks = self._free_blocks(taken)
        if not len(blocks):
            return []
        runs = list(self._equal_blocks(blocks))
        for group in self._other_blocks(blocks):
            runs += self._rewritten_runs(group, rewrite)
        for block in self.equal:
            first, last = self._edges[block : block + 2]
            taken[first:last] = True
        return runs

    def _free_blocks(self, taken: NDArray[np.bool_]) -> Integers:
        first, last, begin = self._edges[:-1], self._edges[1:], max(0, self.begin)
        [inside] = np.nonzero((first >= 0) & (last <= len(taken)))
        before = np.append(0, np.cumsum(taken[begin : self._edges[-1]]))
        free: Integers = inside[before[last[inside] - begin] == before[first[inside] - begin]]
        return free

    @cached_property
    def _edges(self) -> Integers:
        """The atoms of the text at which blocks would begin, and the one behind the last."""
        return self.begin + np.append(0, self.passage.ends)

    def _equal_blocks(self, blocks: Integers) -> Iterator[Run]:
        starts, stops = self.text.first_token(self._edges[blocks]), self.text.first_token(self._edges[blocks + 1])
        if blocks[0] == 0:  # what stands before a passage is not its own
            starts[0] = max(starts[0], stops[0] - self.passage.counts[0])
        for block, start, stop in zip(blocks.tolist(), starts.tolist(), stops.tolist(), strict=True):
            if self._has_tokens(self.text, block, start, stop):
                yield start, int(self.passage.token_starts[block]), stop - start

    def _has_tokens(self, text: TokenisedText, block: int, start: int, stop: int) -> bool:
        counts, hashes = self.passage.counts, self.passage.hashes
        if stop - start != counts[block] or text.hashed(start, stop, self.seed) != hashes[block]:
            return False
        self.equal.add(block)
        return True

    def _other_blocks(self, blocks: Integers) -> Iterator[list[int]]:
        """Yield neighbouring blocks that have the passage's anchors and not its tokens."""
        found = set(np.searchsorted(self._edges, self.places).tolist())
        others = [block for block in blocks.tolist() if block in found and block not in self.equal]
        last = int(blocks[-1])  # which may be too short for an anchor
        if not self.passage.anchors[last] and last not in self.equal and (last == 0 or last - 1 in found):
            others.append(last)
        for _, group in groupby(enumerate(others), lambda pair: pair[1] - pair[0]):
            yield [block for _, block in group]

    def _rewritten_runs(self, group: Sequence[int], rewrite: Rewrite) -> Iterator[Run]:
        """Yield the runs that are equal although the text was rewritten, by the blocks as they were warmed."""
        begin = group[0] - (group[0] - 1 in self.equal)  # some tokenisers look at the word before
        first = int(self._edges[begin])
        words = self.text.atoms.words[first : self._edges[group[-1] + 1]]
        rewritten = rewrite(first - self.begin, words)
        if rewritten is None:
            return
        chunk, lead = rewritten
        for block in group:
            edges = self._edges[block : block + 2]
            start, stop = chunk.first_token(lead + edges - first).tolist()
            if self._has_tokens(chunk, block, start, stop):
                other_start, other_stop = self.text.first_token(edges).tolist()
                pairs = equal_runs(
                    self.text.places(other_start, other_stop, int(edges[0])),
                    chunk.places(start, stop, int(lead + edges[0] - first)),
                )
                shift = int(self.passage.token_starts[block])
                yield from ((other_start + i, shift + j, size) for i, j, size in pairs if size >= MIN_RUN)


Place = tuple[int, int, int]
"""The start and end of a token in a text without white space, and the token's id."""


def equal_runs(left: Sequence[Place], right: Sequence[Place]) -> Iterator[Run]:
    """Yield runs of equal tokens at equal places: the start in both lists, and the length. Takes linear time."""
    i = j = size = 0
    while i < len(left) and j < len(right):
        if left[i] == right[j]:
            i, j, size = i + 1, j + 1, size + 1
            continue
        if size:
            yield i - size, j - size, size
            size = 0
        # Advance the list whose token starts earlier; if both start together, the list whose token ends earlier.
        if left[i][:2] <= right[j][:2]:
            i += 1
        else:
            j += 1
    if size:
        yield i - size, j - size, size
