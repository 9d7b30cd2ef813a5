"""The passages and system prefixes that an engine has in a store: warm, forget and prefetch them.

A prompt of passages alone has one system prefix for a wording, which is stored with the passages. A conversation brings
its own system message, and an agent its tools. Their tokens are the same in each of its prompts, and nothing precedes
them, so a stored copy is right wherever it is found, as near to full prefill as the store's number format.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qcfuse_rag.errors import InvalidTemplate, StoreError
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.ingestion.extension import EntryWriter, Related
from qcfuse_rag.ingestion.prefill import PrefillTarget
from qcfuse_rag.ingestion.primer import PRIMER, primer_ids
from qcfuse_rag.ingestion.warm_job import PrefillWorkers, Progress, WarmJob, WarmSummary, with_prerequisites
from qcfuse_rag.prompts.builder import PromptBuilder, marker_number
from qcfuse_rag.prompts.recognition import RecognitionIndex
from qcfuse_rag.prompts.segments import ChunkPart, Prompt, Role, Segment
from qcfuse_rag.prompts.template import PromptTemplate, Tool, Turn, as_mapping
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.backends.base import KVStore, evict_removed
from qcfuse_rag.store.documents.sources import Sources, wording_of
from qcfuse_rag.store.key import BASES, BLIND, FRAMED, Base, ChunkKey, hash_ids

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class WarmSettings:
    """How passages are warmed; see `Corpus.warm`.

    Attributes:
        sources: for each passage the document it is from, or None.
        replace: these are all the passages of their sources: passages that a source had before and has not now are
            removed, unless another source has them; caches of another model, base or wording of the prompt stay, see
            `forget`. False adds them to the passages that the source has.
        access: for sources that not everybody may read a tag that says who may; None takes it back, sources that are
            not named keep theirs. An entry is derived from those passages only that all its readers may read.
        bases: under which bases to store the passages; by default those the engine's method reads.
        priority: for each passage how much it is wanted; see `ingestion.warm_job.WarmJob`.
        others: passages that are not to be stored now but that derived bases may use; their indices follow those of
            the passages.
        neighbours, vectors, retrievals: for derived bases, see `ingestion.extension.Related`.
        generation: see `Sources.add`; None does not ask whether documents were forgotten.
        batch_tokens: most tokens to compute in one pass; see `ingestion.warm_job.WarmJob`.
        progress: called with tokens `(done, total)` after every batch.
        workers: prefill instead of this process, such as `RayWorkers`.
    """

    sources: Sequence[str | None] | None = None
    replace: bool = True
    access: Mapping[str, str | None] | None = None
    bases: Iterable[Base] | None = None
    priority: Sequence[float] | None = None
    others: Iterable[str] = ()
    neighbours: Sequence[Sequence[int]] | None = None
    vectors: NDArray[np.float32] | None = None
    retrievals: Sequence[Sequence[int]] = ()
    generation: int | None = None
    batch_tokens: int | None = None
    progress: Progress | None = None
    workers: PrefillWorkers | None = None


class Corpus:
    """The passages that a store keeps for one model and one wording of the prompt.

    They are prefilled behind the wording's system prefix, by default under the method's bases.
    """

    def __init__(self, runner: ModelRunner, prompts: PromptBuilder, method: Method) -> None:
        lm, store = runner.lm, runner.store
        self._lm, self._store, self._prompts, self._costs = lm, store, prompts, runner.costs
        primer = primer_ids([prompts.chunk_ids(passage) for passage in PRIMER], lm.context_window.tokens)
        self._target = PrefillTarget(lm, store, prompts.prefix_ids, primer, runner.costs)
        self._method = method
        self._sources: Sources | None = None
        self._inherited: Sources | None = None
        self._followed: int | None = None
        self._generation: int | None = None
        self._opening = threading.Lock()

    @property
    def bases(self) -> tuple[Base, ...]:
        """The bases that the method reads passages under, hence those to warm."""
        return self._method.bases or (FRAMED,)

    def warm(self, texts: Iterable[str], **options: Any) -> WarmSummary:
        """Prefill passages into the store, leaving alone those that are there.

        Args:
            texts: passages, exactly as they will be given to `FusionEngine.prompt`.
            **options: fields of `WarmSettings`.

        Raises:
            StoreError: if the store cannot be written.
            ValueError: if there are not as many sources or priorities as passages.
        """
        given, texts = WarmSettings(**options), list(texts)
        for tier in self._store.tiers:
            tier.restore()
        bases = self.bases if given.bases is None else tuple(given.bases)
        chunks = [self._prompts.chunk_ids(text) for text in texts]
        sources_of = [None] * len(chunks) if given.sources is None else list(given.sources)
        if len(sources_of) != len(chunks):
            raise ValueError(f"{len(sources_of)} sources for {len(chunks)} passages")
        keys_by_source: dict[str | None, list[ChunkKey]] = {None: []}
        for source, chunk in zip(sources_of, chunks, strict=True):
            keys_by_source.setdefault(source, []).extend(self.keys(chunk, with_prerequisites(bases)))
        unowned_keys = set(keys_by_source.pop(None))
        owned = {source: keys for source, keys in keys_by_source.items() if source is not None}
        owned_keys = {key for keys in owned.values() for key in keys} - unowned_keys

        with suppress(StoreError):  # the manifest cannot be read
            self._tell_other_wordings(chunks)
        # Before the job: it may be killed, and access tags decide what an entry may be derived from.
        for source, tag in (given.access or {}).items():
            self.open_sources().restrict(source, tag)
        for source, keys in owned.items():
            self.open_sources().add(source, keys, generation=given.generation)
        with suppress(StoreError):  # the manifest may be readable only
            self.open_sources().release_removed(unowned_keys)

        def confirm(keys: Sequence[ChunkKey]) -> None:
            self.open_sources().discard_unowned(key for key in keys if key in owned_keys)

        summary = self.warm_job(chunks, confirm, **{**options, "bases": bases}).run(given.progress, given.workers)
        for source, keys in owned.items():
            self.open_sources().confirm(source, keys, replace=given.replace)
        left = {source: self.open_sources().addresses(source) for source in owned}
        passages = []
        for text, chunk, source in zip(texts, chunks, sources_of, strict=True):
            keys = self.keys(chunk, bases)
            if keys and (source is None or all(self._store.address(key) in left[source] for key in keys)):
                passages.append((text, keys[0], source is not None))
        try:
            self.index.add(passages)
        except StoreError:
            if summary.warmed:  # a library that cannot be written and is warm already stays as it is
                raise
        self._costs.save()
        self._store.flush()  # last: if a remote cannot be reached, the chunks on the disk are in use all the same
        return summary

    def _tell_other_wordings(self, chunks: Sequence[tuple[int, ...]]) -> None:
        """Say how many passages are stored under another wording alone, whose caches are behind another text."""
        keys = [self.keys(ids, BASES.values()) for ids in dict.fromkeys(chunks) if ids]
        counts = self.open_sources().other_wordings(keys)
        default = PromptBuilder(self._lm.tokenizer, PromptTemplate(), shared=self._prompts)
        known = {wording_of(base.key(self._lm.fingerprint, default.prefix_ids, ())) for base in BASES.values()}
        others = sorted(((count, wording in known) for wording, count in counts.items()), reverse=True)
        if others:
            count, is_default = others[0]
            LOG.warning(
                "%d of these %d passages are stored under another wording of the prompt (%s), behind whose system "
                "message they were prefilled: they are prefilled again; give both the same `prompt_template` to share",
                count,
                len(chunks),
                "the default one" if is_default else "not the default one",
            )

    def warm_job(
        self,
        chunks: Iterable[tuple[int, ...]],
        confirm: Callable[[Sequence[ChunkKey]], None] | None = None,
        **options: Any,
    ) -> WarmJob:
        """Return a job over passages' token ids that can be planned before it is run.

        `confirm` is that of `WarmJob`. The options are fields of `WarmSettings`; `sources`, `replace` and `access` have
        no effect.
        """
        given = WarmSettings(**options)
        bases = self.bases if given.bases is None else tuple(given.bases)
        others = [self._prompts.chunk_ids(text) for text in given.others]
        return WarmJob(
            self._target,
            chunks,
            bases=bases,
            priority=given.priority,
            related=Related(others, given.neighbours, given.vectors, tuple(given.retrievals)),
            writer=self.entry_writer() if any(base.derived for base in bases) else None,
            confirm=confirm,
            batch_tokens=given.batch_tokens,
        )

    def entry_writer(self) -> EntryWriter:
        """Return a writer of entries that methods make from passages, such as `methods.captures.job.capture`.

        Raises:
            StoreError: if the manifest cannot be read.
        """
        losses = self.open_sources().derivations.loss_count()
        return EntryWriter(self._target, self._prompts, self.open_sources, losses)

    def forget(self, source: str) -> int:
        """Remove a document's passages from the store, in every tier; return the number of removed entries.

        Passages that other documents have too stay.

        Raises:
            StoreError: if the store cannot be written.
        """
        return self.open_sources().forget(source)

    def prefetch(self, texts: Iterable[str]) -> None:
        """Start bringing passages into the store's nearest tier; returns at once."""
        bases = self._method.bases
        # A prompt's first passage may be read under any of the bases, the others under the method's own.
        self._store.prefetch(
            [
                key
                for index, text in enumerate(texts)
                for key in self.keys(self._prompts.chunk_ids(text), bases if index == 0 else bases[:1])
            ]
        )

    def keys(self, ids: tuple[int, ...], bases: Iterable[Base]) -> list[ChunkKey]:
        """Return the keys of a passage's token ids, one for each base; none for an empty passage."""
        return [base.key(self._lm.fingerprint, self._prompts.prefix_ids, ids) for base in bases] if ids else []

    def open_sources(self) -> Sources:
        """Return the store's record of documents and their passages; opened when first needed, anew after a fork.

        Raises:
            StoreError: if the manifest cannot be opened.
        """
        with self._opening:
            if self._sources is None or self._sources.manifest.forked or self._sources.manifest.replaced:
                self._inherited = self._sources  # to close it here would close it for the parent process
                self._sources = Sources(self._store)
                with suppress(StoreError):  # the manifest may be readable only
                    if self._sources.garbage.count():
                        self._sources.garbage.collect()
            return self._sources

    @cached_property
    def index(self) -> RecognitionIndex:
        """By which warmed passages are recognised in a text."""
        return RecognitionIndex(self.open_sources, self._lm.fingerprint, self._prompts, self._store.secret)

    def evict_removed(self) -> bool:
        """Drop the entries that any process has removed since the last call; return whether anything was forgotten."""
        removed, before = list[str](), self._generation
        with suppress(StoreError):  # nothing is known then; chunks are still checked when they are read
            self._followed, removed = self.open_sources().garbage.removed_since(self._followed)
            if removed:
                evict_removed(self._store, removed)
            self._generation = self.open_sources().generation()
        return bool(removed) or before not in (None, self._generation)

    def close(self) -> None:
        """Close the manifest."""
        if self._sources is not None and not self._sources.manifest.forked:
            self._sources.close()


MIN_TOKENS = 16
"""Fewest tokens of a system prefix that are worth a read from the store."""
ABSENT_S = 60.0
"""Seconds after which an absent system prefix is sought again: a store may be remote, and others may warm it."""
MAX_ABSENT = 1024
"""Most absent system prefixes to remember."""


class SystemPrefixes:
    """The system prefixes of conversations that a store keeps for one model."""

    def __init__(self, lm: LanguageModel, store: KVStore) -> None:
        self._target = PrefillTarget(lm, store, ())
        self._absent: dict[str, float] = {}

    def warm(self, builder: PromptBuilder, system: str | None = None, tools: Sequence[Tool] = ()) -> WarmSummary:
        """Prefill the system prefix of a system message, if there is one, and tools.

        It is stored for conversations as they are, and for conversations beside which passages are given: there the
        prompt template's system message comes first.

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
        """Return a prompt whose first segment is its system prefix if that is stored; its messages are `turns`."""
        if prompt.segments[0].role is Role.SYSTEM_PREFIX:
            return prompt
        with suppress(InvalidTemplate):  # some chat templates take these messages only together with the others
            prefix = system_prefix(builder, turns, tools)
            if self._is_stored(prefix.ids):
                return prefix.put_before(prompt)
        return prompt

    def _is_stored(self, ids: tuple[int, ...]) -> bool:
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

    There are none if the chat template writes the beginning in another way for each conversation.
    """

    ids: tuple[int, ...]
    ends: tuple[int, ...]  # for each token the number of characters up to its end

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
        part = None if common == len(self.ids) else ChunkPart(hash_ids(self.ids), len(self.ids), 0)
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
