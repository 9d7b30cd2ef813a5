"""Make prompts of text in which warmed passages are recognised: finished text of a framework, a conversation's turns.

A prompt's ids are those of the text tokenised as a whole. A passage was tokenised alone when it was warmed; where its
tokens equal the text's, the stored cache is used, and others are ordinary rows. So recognition changes what is
computed, never the ids: a method that reuses nothing computes exactly the prompt of the model's own pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qcfuse_rag.errors import InvalidTemplate, StoreError
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.chat_template import RenderedText
from qcfuse_rag.prompts.passage_blocks import Offsets
from qcfuse_rag.prompts.passage_index import StoredRun
from qcfuse_rag.prompts.segments import ChunkPart, Prompt, Role, Segment
from qcfuse_rag.prompts.template import Tool, Turn

UNSOUGHT = "no passages were looked for"
"""The beginning of a fallback where a text was not searched for passages; the reason follows a colon."""

FindPassages = Callable[[str, Sequence[int], Offsets], list[StoredRun] | None]
"""Returns the parts of warmed passages in a text with its tokens, see `PassageIndex.find`; may raise `StoreError`."""


def prompt_from_text(
    builder: PromptBuilder,
    find: FindPassages,
    conversation: Sequence[Turn] | str,
    tools: Sequence[Tool] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Prompt:
    """See `FusionEngine.prompt_from_text`; if passages cannot be searched, the prompt's note says why."""
    finished = isinstance(conversation, str)
    if finished and chat_template_kwargs:
        raise InvalidTemplate("finished text has no chat template; give messages, or omit chat_template_kwargs")
    builder = builder.with_kwargs(chat_template_kwargs)
    rendered = RenderedText(conversation) if isinstance(conversation, str) else builder.render(conversation, tools)
    segments, note, searched = text_segments(builder, find, rendered, begin=finished)
    return Prompt(tuple(segments), prefix_ids=builder.prefix_ids, joined=True, note=note, searched=searched)


def prompt_among_turns(
    builder: PromptBuilder,
    find: FindPassages,
    question: str,
    passages: Sequence[str],
    history: Sequence[Turn],
    tools: Sequence[Tool],
    later: Sequence[Turn],
) -> Prompt:
    """See `PromptBuilder.build`; warmed passages in other turns, of earlier questions and tools, are recognised."""
    if not history and not later:
        return builder.build(question, passages, tools=tools)
    notes, searches = list[str | None](), list[bool]()

    def split_text(rendered: RenderedText) -> list[Segment]:
        segments, note, searched = text_segments(builder, find, rendered)
        notes.append(note)
        searches.append(searched)
        return segments

    prompt = builder.build(question, passages, history, tools, later, split_text)
    return replace(prompt, note=next(filter(None, notes), None), joined=True, searched=any(searches))


def text_segments(
    builder: PromptBuilder, find: FindPassages, rendered: RenderedText, *, begin: bool = False
) -> tuple[list[Segment], str | None, bool]:
    """Return the segments of a text, of which the last is not stored, and how it was searched for passages.

    That is why it could not be searched, or None, and whether there was any passage to be found. `begin` puts the
    tokenizer's start token in front.
    """
    text, note, runs = rendered.text, None, None
    ids, offsets = builder.tokens.encode_whole(rendered, begin=begin)  # refuses a text that is too long to be searched
    if not ids:  # `Prompt` refuses a prompt of nothing else with the reason
        return [Segment(Role.TEXT, (), text)], None, False
    try:
        runs = find(text, ids, offsets)
    except StoreError as error:
        note = f"{UNSOUGHT}: {error}"

    def segment(role: Role, start: int, stop: int, part: ChunkPart | None = None) -> Segment:
        return Segment(role, ids[start:stop], text[offsets[start][0] : offsets[stop - 1][1]], part)

    segments: list[Segment] = []
    end = 0
    for run in runs or ():
        stop = min(run.stop, len(ids) - 1)  # the last token must be computed to answer
        if end < run.start:
            segments.append(segment(Role.TEXT, end, run.start))
        if run.start < stop:
            segments.append(segment(Role.CHUNK, run.start, stop, run.part))
        end = stop
    return [*segments, segment(Role.TEXT, end, len(ids))], note, runs is not None
