"""Build a prompt from finished text in which passages were found.

The prompt's ids are those of the text tokenised as a whole. A passage was tokenised alone when it was warmed; its
tokens equal those of the text everywhere but at its edges. Equal tokens use the stored cache; others are ordinary rows.
So a method that finds or reuses nothing computes exactly the prompt of the model's own pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.segments import ChunkPart, Prompt, Role, Segment
from qcfuse_rag.prompts.special_tokens import RenderedText
from qcfuse_rag.store.documents.passage_match import PassageMatch, atom_characters_before

MIN_RUN = 16
"""Fewest equal tokens in a row that are worth a read from the store."""


def prompt_from_joined_text(
    builder: PromptBuilder, rendered: RenderedText, matches: Sequence[PassageMatch] = (), *, begin: bool = False
) -> Prompt:
    """Build a prompt from a text.

    Args:
        builder: builder of the prompts that passages are warmed for.
        rendered: a conversation or finished text.
        matches: passages found in the text, in order.
        begin: put the tokenizer's start token in front.
    """
    segments = text_segments(builder, rendered, matches, begin=begin)
    return Prompt(tuple(segments), prefix_ids=builder.prefix_ids, joined=True)


def text_segments(
    builder: PromptBuilder, rendered: RenderedText, matches: Sequence[PassageMatch], *, begin: bool = False
) -> list[Segment]:
    """Return the segments of a text, of which the last one is not stored; see `prompt_from_joined_text`."""
    text = rendered.text
    ids, offsets = builder.encode_whole(rendered, begin=begin)
    if not ids:  # `Prompt` refuses a prompt of nothing else with the reason
        return [Segment(Role.TEXT, (), text)]

    def segment(role: Role, start: int, stop: int, part: ChunkPart | None = None) -> Segment:
        return Segment(role, ids[start:stop], text[offsets[start][0] : offsets[stop - 1][1]], part)

    segments: list[Segment] = []
    end = 0
    for start, stop, part in _stored_parts(builder, text, ids, offsets, matches):
        stop = min(stop, len(ids) - 1)  # the last token must be computed to answer
        if end < start:
            segments.append(segment(Role.TEXT, end, start))
        segments.append(segment(Role.CHUNK, start, stop, part))
        end = stop
    return [*segments, segment(Role.TEXT, end, len(ids))]


def _stored_parts(
    builder: PromptBuilder,
    text: str,
    ids: tuple[int, ...],
    offsets: Sequence[tuple[int, int]],
    matches: Sequence[PassageMatch],
) -> Iterator[tuple[int, int, ChunkPart]]:
    """Yield the token ranges `start <= t < stop` whose tokens equal those of a stored chunk, in order."""
    start = 0
    for match in matches:
        while start < len(ids) and offsets[start][1] <= match.start:
            start += 1
        stop = start
        while stop < len(ids) and offsets[stop][0] < match.stop:
            stop += 1
        chunk_ids = builder.chunk_ids(match.text)
        in_text = _positioned(text[match.start : match.stop], ids[start:stop], offsets[start:stop], match.start)
        in_chunk = _positioned(match.text, chunk_ids, builder.chunk_offsets(match.text), builder.chunk_lead)
        for chunk_start, text_start, size in _equal_runs(in_chunk, in_text):
            if size >= MIN_RUN:
                first = start + text_start
                yield first, first + size, ChunkPart(chunk_ids, chunk_start)
        start = stop


PositionedToken = tuple[int, int, int]
"""Start and end of a token in its text without whitespace, and its id."""


def _positioned(text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]], lead: int) -> list[PositionedToken]:
    """Return the positions of tokens in a text without its whitespace.

    Args:
        text: the text.
        ids: token ids.
        offsets: characters `start <= c < stop` of each token, counted from `lead` characters before the text.
        lead: offset of the text's first character.
    """
    atoms = atom_characters_before(text)
    last = len(text)
    inside = [(min(max(start - lead, 0), last), min(max(stop - lead, 0), last)) for start, stop in offsets]
    return [(atoms[start], atoms[stop], token) for (start, stop), token in zip(inside, ids, strict=True)]


def _equal_runs(left: list[PositionedToken], right: list[PositionedToken]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of equal tokens at equal positions: the start in both lists, and the length. Takes linear time."""
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
