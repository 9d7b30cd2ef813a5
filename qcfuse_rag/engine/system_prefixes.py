"""The stored system prefixes of conversations: the system message and the tools, as the chat template writes them.

A prompt of passages alone has one system prefix for a wording, which is stored with the passages. A conversation brings
its own system message, and an agent its tools. Their tokens are the same in each of its prompts, and nothing precedes
them, so a stored copy is right wherever it is found, as near to full prefill as the store's number format.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile

from qcfuse_rag.errors import InvalidTemplate
from qcfuse_rag.ingestion.target import PrefillTarget
from qcfuse_rag.ingestion.warm_job import WarmJob, WarmSummary
from qcfuse_rag.prompts.builder import PromptBuilder, marker_number
from qcfuse_rag.prompts.segments import ChunkPart, Prompt, Role, Segment
from qcfuse_rag.prompts.template import Tool, Turn, as_mapping
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.key import BLIND

MIN_TOKENS = 16
"""Fewest tokens of a system prefix that are worth a read from the store."""
ABSENT_S = 60.0
"""Seconds after which an absent system prefix is sought again: a store may be remote, and others may warm it."""
MAX_ABSENT = 1024
"""Most absent system prefixes to remember."""


class SystemPrefixes:
    """The system prefixes of conversations that a store keeps for one model.

    Args:
        lm: the model.
        store: where keys and values are kept.
    """

    def __init__(self, lm: LanguageModel, store: KVStore) -> None:
        self._target = PrefillTarget(lm, store, ())
        self._absent: dict[str, float] = {}

    def warm(self, builder: PromptBuilder, system: str | None = None, tools: Sequence[Tool] = ()) -> WarmSummary:
        """Prefill the system prefix of a system message and tools.

        It is stored for conversations as they are, and for conversations beside which passages are given: there the
        prompt template's system message comes first.

        Args:
            builder: of the prompts.
            system: the system message; None if there is none.
            tools: tools that the model may call.

        Raises:
            InvalidTemplate: if the tokenizer's chat template does not take the system message, shows no tools, or does
                not read one of the variables.
            StoreError: if the store cannot be written.
        """
        turns: list[Turn] = [] if system is None else [("system", system)]
        prefixes = [system_prefix(builder, given, tools).ids for given in (turns, builder.turns("", (), turns))]
        long_enough = [ids for ids in prefixes if len(ids) >= MIN_TOKENS]
        summary = WarmJob(self._target, long_enough, bases=(BLIND,)).run()
        self._absent = {}
        self._target.store.flush()
        return summary

    def with_system_prefix(
        self, builder: PromptBuilder, prompt: Prompt, turns: Sequence[Turn], tools: Sequence[Tool]
    ) -> Prompt:
        """Return a prompt whose first segment is its system prefix if that is stored.

        Args:
            builder: of the prompt.
            prompt: the prompt.
            turns: its messages, of which the leading system messages are read.
            tools: its tools.
        """
        if prompt.segments[0].role is Role.SYSTEM_PREFIX:
            return prompt
        with suppress(InvalidTemplate):  # some chat templates take these messages only together with the others
            prefix = system_prefix(builder, turns, tools)
            if self._is_stored(prefix.ids):
                return prefix.put_before(prompt)
        return prompt

    def _is_stored(self, ids: tuple[int, ...]) -> bool:
        """Return whether a system prefix is stored; one that was absent is not sought again for a while."""
        key, now = self._target.key(BLIND, ids), time.monotonic()
        if len(ids) < MIN_TOKENS or self._absent.get(key.address, 0.0) > now:
            return False
        if key in self._target.store:
            return True
        if len(self._absent) >= MAX_ABSENT:
            self._absent = {}
        self._absent[key.address] = now + ABSENT_S
        return False


@dataclass(frozen=True, slots=True)
class SystemPrefix:
    """The tokens before the first message that is not the system's.

    Attributes:
        ids: token ids, empty if the chat template writes the beginning in another way for each conversation.
        ends: for each token the number of characters up to its end.
    """

    ids: tuple[int, ...]
    ends: tuple[int, ...]

    def put_before(self, prompt: Prompt) -> Prompt:
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

    Raises:
        InvalidTemplate: if the chat template does not take the system messages, or does not show the tools.
    """
    system = list(takewhile(lambda turn: as_mapping(turn)["role"] == "system", turns))
    marker = f"[[qcfuse:{marker_number(system, tools, builder.template.chat_template_kwargs)}:turn]]"
    rendered = builder.render([*system, ("user", marker)], tools)
    if rendered.text.count(marker) != 1:
        return SystemPrefix((), ())
    ids, offsets = builder.tokens.encode_whole(rendered.part(0, rendered.text.index(marker)), begin=False)
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
