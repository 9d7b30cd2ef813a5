"""The stored system prefixes of conversations: warm them, and let prompts begin with them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from qcfuse_rag.errors import InvalidTemplate
from qcfuse_rag.ingestion.summary import WarmSummary
from qcfuse_rag.ingestion.target import PrefillTarget
from qcfuse_rag.ingestion.warm_job import WarmJob
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.segments import Prompt, Role
from qcfuse_rag.prompts.system_prefix import MIN_TOKENS, system_prefix
from qcfuse_rag.prompts.template import Tool, Turn
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.prefill_base import BLIND

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
                return prefix.with_system_prefix(prompt)
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
