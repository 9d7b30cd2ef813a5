"""The system prefix of a conversation: its system message and its tools, as the chat template writes them.

A prompt of passages alone has one system prefix for a wording, which is stored with the passages. A conversation brings
its own system message, and an agent its tools. Their tokens are the same in each of its prompts, and nothing precedes
them, so a stored copy is right wherever it is found, as near to full prefill as the store's number format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from qcfuse_rag.prompts.builder import PromptBuilder, marker_number
from qcfuse_rag.prompts.segments import ChunkPart, Prompt, Role, Segment
from qcfuse_rag.prompts.template import Tool, Turn, as_mapping

MIN_TOKENS = 16
"""Fewest tokens of a system prefix that are worth a read from the store."""


@dataclass(frozen=True, slots=True)
class SystemPrefix:
    """The tokens before the first message that is not the system's.

    Attributes:
        ids: token ids, empty if the chat template writes the beginning in another way for each conversation.
        ends: for each token the number of characters up to its end.
    """

    ids: tuple[int, ...]
    ends: tuple[int, ...]

    def with_system_prefix(self, prompt: Prompt) -> Prompt:
        """Return a prompt of the same tokens whose first segment is this system prefix, as far as the tokens are equal.

        The last tokens of a system prefix may differ in a prompt, where they can join the text that follows. A passage
        that is recognised in it stays a chunk, and the prefix ends before it: the passage can be forgotten.
        """
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.ids, prompt.ids, strict=False)))
        first_chunk = next((span.start for span in prompt.chunks), len(prompt))
        common = min(common, first_chunk, len(prompt) - 1)  # the last token must be computed to answer
        if common < MIN_TOKENS:
            return prompt
        part = None if common == len(self.ids) else ChunkPart(self.ids, 0)
        text = "".join(segment.text for segment in prompt.segments)[: self.ends[common - 1]]
        prefix = Segment(Role.SYSTEM_PREFIX, self.ids[:common], text, part)
        return replace(prompt, segments=(prefix, *_segments_from(prompt, common, len(text))))


def system_prefix(builder: PromptBuilder, turns: Sequence[Turn], tools: Sequence[Tool] = ()) -> SystemPrefix:
    """Return the system prefix of a conversation.

    Args:
        builder: of the prompts.
        turns: the messages, of which the leading system messages are read.
        tools: what the model may call.

    Raises:
        InvalidTemplate: if the chat template does not take the system messages, or does not show the tools.
    """
    system = list(takewhile(lambda turn: as_mapping(turn)["role"] == "system", turns))
    marker = f"[[qcfuse:{marker_number(system, tools, builder.template.chat_template_kwargs)}:turn]]"
    rendered = builder.render([*system, ("user", marker)], tools)
    if rendered.text.count(marker) != 1:
        return SystemPrefix((), ())
    ids, offsets = builder.encode_whole(rendered.part(0, rendered.text.index(marker)), begin=False)
    return SystemPrefix(ids, tuple(stop for _, stop in offsets))


def _segments_from(prompt: Prompt, tokens: int, characters: int) -> Iterator[Segment]:
    """Yield the segments after so many tokens and characters; a segment that begins before them is cut."""
    for span in prompt.spans:
        segment = span.segment
        if span.stop <= tokens:
            characters -= len(segment.text)
        elif span.start < tokens:
            yield replace(segment, ids=segment.ids[tokens - span.start :], text=segment.text[characters:])
        else:
            yield segment
