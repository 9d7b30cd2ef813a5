"""A prompt from finished text in which passages were found: the ids are those of the text, tokenised as a whole.

A passage was tokenised apart when it was warmed. Where its tokens are the text's, which is everywhere but at its edges,
what is stored is used; the others are ordinary rows. So whoever finds nothing, or recomputes everything, has the very
prompt that the model's own pipeline has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.segments import ChunkPart, Prompt, Role, Segment
from qcfuse_rag.prompts.special_tokens import RenderedText
from qcfuse_rag.store.documents.passage_match import PassageMatch, atom_characters_before

FEWEST = 16
"""Tokens in a row; fewer are not worth a look into the store."""


def prompt_from_joined_text(
    builder: PromptBuilder, rendered: RenderedText, found: Sequence[PassageMatch] = (), *, begin: bool = False
) -> Prompt:
    """Build a prompt of a text.

    Args:
        builder: of the prompts that passages are warmed for.
        rendered: a conversation or finished text.
        found: passages in it, in order.
        begin: put the tokenizer's start token in front.
    """
    text = rendered.text
    ids, offsets = builder.encode_whole(rendered, begin=begin)
    if not ids:
        return Prompt(
            (Segment(Role.TEXT, (), text),), prefix_ids=builder.prefix_ids, joined=True
        )  # which says that it is none
    segments: list[Segment] = []
    at = 0
    for start, stop, part in _parts(builder, text, ids, offsets, found):
        stop = min(stop, len(ids) - 1)  # something must be computed to answer
        if at < start:
            segments.append(_segment(Role.TEXT, ids, offsets, text, at, start))
        segments.append(_segment(Role.CHUNK, ids, offsets, text, start, stop, part))
        at = stop
    segments.append(_segment(Role.TEXT, ids, offsets, text, at, len(ids)))
    return Prompt(tuple(segments), prefix_ids=builder.prefix_ids, joined=True)


def _segment(
    role: Role,
    ids: tuple[int, ...],
    offsets: Sequence[tuple[int, int]],
    text: str,
    start: int,
    stop: int,
    part: ChunkPart | None = None,
) -> Segment:
    return Segment(role, ids[start:stop], text[offsets[start][0] : offsets[stop - 1][1]], part)


def _parts(
    builder: PromptBuilder,
    text: str,
    ids: tuple[int, ...],
    offsets: Sequence[tuple[int, int]],
    found: Sequence[PassageMatch],
) -> Iterator[tuple[int, int, ChunkPart]]:
    """Yield where parts of passages stand, token `start` to `stop`, in order."""
    token = 0
    for passage in found:
        while token < len(ids) and offsets[token][1] <= passage.start:
            token += 1
        last = token
        while last < len(ids) and offsets[last][0] < passage.stop:
            last += 1
        stored = builder.chunk_ids(passage.text)
        mine = _placed(text[passage.start : passage.stop], ids[token:last], offsets[token:last], passage.start)
        theirs = _placed(passage.text, stored, builder.chunk_offsets(passage.text), builder.chunk_lead)
        for there, here, size in _equal_runs(theirs, mine):
            if size >= FEWEST:
                yield token + here, token + here + size, ChunkPart(stored, there)
        token = last


PlacedToken = tuple[int, int, int]
"""Where a token begins and ends in its text without whitespace, and its id."""


def _placed(text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]], lead: int) -> list[PlacedToken]:
    """Return where tokens stand in a text, which begins at offset `lead`, whatever its whitespace."""
    at = atom_characters_before(text)
    last = len(text)
    inside = [(min(max(start - lead, 0), last), min(max(stop - lead, 0), last)) for start, stop in offsets]
    return [(at[start], at[stop], token) for (start, stop), token in zip(inside, ids, strict=True)]


def _equal_runs(one: list[PlacedToken], other: list[PlacedToken]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of equal tokens at equal places: where each begins in both, and its length. Takes linear time."""
    i = j = size = 0
    while i < len(one) and j < len(other):
        if one[i] == other[j]:
            i, j, size = i + 1, j + 1, size + 1
            continue
        if size:
            yield i - size, j - size, size
            size = 0
        # behind is whoever begins earlier; of tokens that begin alike, whoever ends earlier, as whitespace does
        if one[i][:2] <= other[j][:2]:
            i += 1
        else:
            j += 1
    if size:
        yield i - size, j - size, size
