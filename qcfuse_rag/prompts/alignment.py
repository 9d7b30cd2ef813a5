"""Compare a passage with the place of a text where its anchors were found, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from qcfuse_rag.prompts.passage_blocks import Integers, PassageBlocks, TokenisedText

MIN_RUN = 4
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
        first, last, taken_before = self._edges[:-1], self._edges[1:], np.append(0, np.cumsum(taken))
        [inside] = np.nonzero((first >= 0) & (last <= len(taken)))
        free: Integers = inside[taken_before[last[inside]] == taken_before[first[inside]]]
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
"""Where a token begins and ends in a text without white space, and its id."""


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
