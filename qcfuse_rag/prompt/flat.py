"""A prompt from finished text in which passages were found: the ids are those of the text, tokenised as a whole.

A passage was tokenised apart when it was warmed. Where its tokens are the text's, which is everywhere but at its edges,
what is stored is used; the others are ordinary rows. So whoever finds nothing, or recomputes everything, has the very
prompt that the model's own pipeline has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from qcfuse_rag.prompt.locate import Found
from qcfuse_rag.prompt.segments import Part, Prompt, Role, Segment
from qcfuse_rag.prompt.template import PromptBuilder

FEWEST = 16
"""Tokens in a row; fewer are not worth a look into the store."""


def flat_prompt(builder: PromptBuilder, text: str, found: Sequence[Found] = (), *, begin: bool = False) -> Prompt:
    """Build a prompt of a text.

    Args:
        builder: of the prompts that passages are warmed for.
        text: a rendered conversation or finished text.
        found: passages in it, in order.
        begin: put the tokenizer's start token in front.
    """
    ids, offsets = builder.encode_whole(text, begin=begin)
    segments: list[Segment] = []
    at = 0
    for start, stop, part in _parts(builder, ids, offsets, found):
        stop = min(stop, len(ids) - 1)  # something must be computed to answer
        if at < start:
            segments.append(_segment(Role.TEXT, ids, offsets, text, at, start))
        segments.append(_segment(Role.CHUNK, ids, offsets, text, start, stop, part))
        at = stop
    segments.append(_segment(Role.TEXT, ids, offsets, text, at, len(ids)))
    return Prompt(tuple(segments), frame=builder.frame)


def _segment(
    role: Role,
    ids: tuple[int, ...],
    offsets: Sequence[tuple[int, int]],
    text: str,
    start: int,
    stop: int,
    part: Part | None = None,
) -> Segment:
    return Segment(role, ids[start:stop], text[offsets[start][0] : offsets[stop - 1][1]], part)


def _parts(
    builder: PromptBuilder, ids: tuple[int, ...], offsets: Sequence[tuple[int, int]], found: Sequence[Found]
) -> Iterator[tuple[int, int, Part]]:
    """Yield where parts of passages stand, token `start` to `stop`, in order."""
    token = 0
    for passage in found:
        while token < len(ids) and offsets[token][1] <= passage.start:
            token += 1
        last = token
        while last < len(ids) and offsets[last][0] < passage.stop:
            last += 1
        stored = builder.chunk_ids(passage.text)
        # Of as many tokens that a popular one could hide everything else: no heuristics.
        for block in SequenceMatcher(None, stored, ids[token:last], autojunk=False).get_matching_blocks():
            if block.size >= FEWEST:
                yield token + block.b, token + block.b + block.size, Part(stored, block.a)
        token = last
