"""The engine: one model, one store, one prompt template; warm passages, answer questions."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from qcfuse_rag.engine.exactness_check import check_exact
from qcfuse_rag.engine.first_passes import run_first_passes
from qcfuse_rag.engine.verdict import Verdict, require_verdict
from qcfuse_rag.errors import PromptTooLong, StoreError, Unverified
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import Prefilled, prefill
from qcfuse_rag.fusion.recompute import Pause
from qcfuse_rag.fusion.report import UNSOUGHT, FusionReport
from qcfuse_rag.generation.batch import answer_many
from qcfuse_rag.generation.decode import Generation, TextStream
from qcfuse_rag.generation.sampling import Sampler, SamplingParams
from qcfuse_rag.generation.speculative import SpeculativeGeneration, generate_speculative
from qcfuse_rag.ingestion.capture_job import CaptureJob, CaptureSummary
from qcfuse_rag.ingestion.neighbour_policy import NeighbourPolicy
from qcfuse_rag.ingestion.primer import PRIMER, PRIMER_TOKENS
from qcfuse_rag.ingestion.provenance_ledger import ProvenanceLedger
from qcfuse_rag.ingestion.summary import WarmSummary
from qcfuse_rag.ingestion.warm_job import PrefillWorkers, Progress, Staleness, WarmJob, with_prerequisites
from qcfuse_rag.methods import choose_method
from qcfuse_rag.methods.relaycaching.answer_cache import Kept, keep_generated
from qcfuse_rag.monitoring.in_flight import InFlight
from qcfuse_rag.monitoring.shadow import Shadow, ShadowSettings
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.joined_text import prompt_from_joined_text
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.prompts.special_tokens import RenderedText, estimate_length
from qcfuse_rag.prompts.template import PromptTemplate, Tool, Turn
from qcfuse_rag.runtime.costs import MeasuredCosts
from qcfuse_rag.runtime.graphs.decode_graphs import DecodeRunner
from qcfuse_rag.runtime.graphs.prefill_graphs import PrefillRunner
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.layer_profile import LayerProfile, find_profile
from qcfuse_rag.runtime.loading.loading import LIMIT_S, Loading
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.documents.passage_signatures import Located
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.factory import open_store
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.prefill_base import FRAMED, Base

LOG = logging.getLogger(__name__)

QUICKLY_READ = 1 << 20
"""Characters that are tokenised in a second at most, so that nobody need guess."""


class FusionEngine:
    """Answers questions over passages whose keys and values were computed beforehand.

    Safe to use from several threads: a request's state is its own.

    Args:
        lm: the model.
        store: where passages' keys and values are kept; closed with the engine.
        template: wording of the prompt.
        method: what to reuse and what to recompute when a request does not say.
        load_limit_s: most seconds that a request waits for the store; what has not come by then is computed. None waits
            as long as it takes.

    Attributes:
        profile: the profile that `load` gave the model its critical layers from, or None.
        profile_ignored: why `load` did not use the profile that is beside the store, or None.
        costs: what passes and loading cost here, by which a method's guard decides; see `runtime.costs`.
        passes: computes rows of a prompt; see `runtime.graphs.prefill_graphs`.
        step: computes the next token's row of one or several requests; see `runtime.graphs.decode_graphs`.
        verdict: what `qcfuse verify` found out about the method on this model, where `load` found it, or None.
    """

    def __init__(
        self,
        lm: LanguageModel,
        store: KVStore,
        *,
        template: PromptTemplate | None = None,
        method: Method | None = None,
        load_limit_s: float | None = LIMIT_S,
    ) -> None:
        self.lm = lm
        self.store = store
        self.prompts = PromptBuilder(lm.tokenizer, template or PromptTemplate())
        self.method = method or choose_method()
        self.verdict: Verdict | None = None
        self._activity = InFlight()
        self._shadow: Shadow | None = None
        self._sources: Sources | None = None
        self._inherited: Sources | None = None
        self._followed: int | None = None
        self._opening = threading.Lock()
        self._observers: tuple[Callable[[FusionReport], None], ...] = ()
        self._company = NeighbourPolicy(lm, self.prompts.prefix_ids, lambda: self.sources)
        self.passes = PrefillRunner(lm)
        self.costs = MeasuredCosts(lm, store, self.passes)
        self.step = DecodeRunner(lm)
        self._loading = Loading(lm, load_limit_s)
        self.profile: LayerProfile | None = None
        self.profile_ignored: str | None = None

    @classmethod
    def load(
        cls,
        model: str,
        *,
        store: str | Path | KVStore | None = None,
        template: PromptTemplate | None = None,
        method: Method | None = None,
        device: str | None = None,
        dtype: str | None = None,
        check: bool = True,
        profile: str | Path | None = None,
        verdict: Literal["warn", "require", "ignore"] = "warn",
        load_limit_s: float | None = LIMIT_S,
    ) -> FusionEngine:
        """Load a model and open a store.

        Args:
            model: Hugging Face id, local folder or GGUF file.
            store: a folder, an open store, or None to keep passages in memory only.
            template: wording of the prompt.
            method: default method; see `choose_method` for what None means.
            device: such as `cpu` or `cuda:0`; a GPU if there is one.
            dtype: such as `bfloat16`; float32 on a CPU, the checkpoint's own on a GPU.
            check: compare the engine with the model's own code on a few tokens before trusting it.
            profile: a file from `qcfuse profile` that says which layers are critical. By default the `profile.json` in
                the store's folder, if there is one and it is of this model; else `profile_ignored` says why not.
            verdict: what to do without a passing verdict of `qcfuse verify` on this model and method in the store's
                folder: `warn`, `require` one, or `ignore`. A store without a folder has no place for one: there is no
                warning of it, and it cannot meet a requirement.
            load_limit_s: most seconds that a request waits for the store.

        Raises:
            ModelNotFound: if the model cannot be loaded.
            UnsupportedModel: if reuse would not be right for it, or the check fails.
            StoreError: if the store cannot be opened.
            ProfileError: if the given profile cannot be read or is of another model.
            Unverified: if a verdict is required and there is none that passed.
        """
        lm = LanguageModel.load(model, device=device, dtype=dtype)
        beside = store.folder if isinstance(store, KVStore) else None if store is None else Path(store).expanduser()
        found = find_profile(lm, profile, beside)
        if check:
            check_exact(lm)
        kept = store if isinstance(store, KVStore) else open_store(store)
        engine = cls(found.applied(lm), kept, template=template, method=method, load_limit_s=load_limit_s)
        engine.profile, engine.profile_ignored = found.profile, found.ignored
        if verdict != "ignore" and (kept.folder is not None or verdict == "require"):
            try:
                engine.verdict = require_verdict(engine.lm, kept, engine.method, require=verdict == "require")
            except Unverified:
                if not isinstance(store, KVStore):
                    engine.close()
                raise
        return engine

    def warm(
        self,
        texts: Iterable[str],
        *,
        sources: Sequence[str | None] | None = None,
        replace: bool = True,
        bases: Iterable[Base] | None = None,
        priority: Sequence[float] | None = None,
        neighbours: Sequence[Sequence[int]] | None = None,
        vectors: NDArray[np.float32] | None = None,
        retrievals: Sequence[Sequence[int]] = (),
        others: Iterable[str] = (),
        access: Mapping[str, str | None] | None = None,
        batch_tokens: int | None = None,
        progress: Progress | None = None,
        workers: PrefillWorkers | None = None,
    ) -> WarmSummary:
        """Prefill passages into the store, leaving alone those that are there.

        Args:
            texts: passages, exactly as they will be given to `prompt`.
            sources: for each passage the document it is from, or None.
            replace: these are all the passages of their sources: what a source had before and has not now is removed,
                unless another source has it; caches of another model, base or wording of the prompt stay, see `forget`.
                False adds them to those it has.
            bases: under which bases; by default those the engine's method reads.
            priority: for each passage how much it is wanted; see `ingestion.warm_job.WarmJob`.
            neighbours: for enriched bases, each passage's related ones among these, see `ingestion.neighbours`; those with
                the nearest `vectors` if None.
            vectors: `[len(texts) + len(others), D]`, the passages' embeddings; by the model's own tokens if None.
            retrievals: indices of passages that were retrieved together, one sequence for each retrieval; such company
                comes before what is merely near by its vectors.
            others: passages that are not to be stored now but may be neighbours; their indices follow those of `texts`.
            access: for sources that not everybody may read a tag that says who may; None takes it back, sources that
                are not named keep what they had. A passage is enriched by those only that all its readers may read.
            batch_tokens: most tokens to compute in one pass; see `ingestion.warm_job.WarmJob`.
            progress: called with tokens `(done, total)` after every batch.
            workers: prefill instead of this process, such as `RayWorkers`.

        Raises:
            StoreError: if the store cannot be written.
            ValueError: if there are not as many sources or priorities as passages.
        """
        chosen = tuple(bases) if bases is not None else self.bases
        texts = list(texts)
        ids = [self.prompts.chunk_ids(text) for text in texts]
        if sources is not None and len(sources) != len(ids):
            raise ValueError(f"{len(sources)} sources for {len(ids)} passages")
        keys: dict[str, list[ChunkKey]] = {}
        for source, chunk in zip(sources or (), ids, strict=False):
            if source is not None:
                keys.setdefault(source, []).extend(self.keys(chunk, with_prerequisites(chosen)))
        for source, tag in (access or {}).items():
            self.sources.restrict(source, tag)
        for source, own in keys.items():  # first: a job may be killed, and who may read what decides who meets whom
            self.sources.add(source, own)
        job = self.warm_job(
            ids,
            bases=chosen,
            priority=priority,
            neighbours=neighbours,
            vectors=vectors,
            retrievals=retrievals,
            others=[self.prompts.chunk_ids(text) for text in others],
            batch_tokens=batch_tokens,
        )
        summary = job.run(progress, workers)
        for source, own in keys.items():
            if replace:
                self.sources.replace(source, own)
            else:
                self.sources.add(source, own)
        named = [(text, self.keys(chunk, chosen[:1])) for text, chunk in zip(texts, ids, strict=True)]
        try:
            self.located.add((text, own[0]) for text, own in named if own)
        except StoreError:
            if summary.warmed:  # else a library that cannot be written is as warm as it was
                raise
        return summary

    def warm_job(
        self,
        chunks: Iterable[tuple[int, ...]],
        *,
        bases: Iterable[Base] | None = None,
        priority: Sequence[float] | None = None,
        neighbours: Sequence[Sequence[int]] | None = None,
        vectors: NDArray[np.float32] | None = None,
        retrievals: Sequence[Sequence[int]] = (),
        others: Sequence[tuple[int, ...]] = (),
        batch_tokens: int | None = None,
    ) -> WarmJob:
        """Return a job that can be planned before it is run; for passages as token ids, see `prompts.chunk_ids`."""
        chosen = tuple(bases) if bases is not None else self.bases
        stale: Staleness | None = None
        ledger: ProvenanceLedger | None = None
        if any(base.enriched for base in chosen):
            chunks, ledger = list(chunks), self._company.ledger()
            neighbours = self._company.neighbours(
                chunks, others, given=neighbours, vectors=vectors, retrievals=retrievals
            )
            stale = self._company.staleness([*chunks, *others])
        return WarmJob(
            self.lm,
            self.store,
            self.prompts.prefix_ids,
            chunks,
            bases=chosen,
            priority=priority,
            neighbours=neighbours,
            others=others,
            primer=self.prompts.chunk_ids(PRIMER)[:PRIMER_TOKENS],
            batch_tokens=batch_tokens,
            ledger=ledger,
            stale=stale,
        )

    @property
    def bases(self) -> tuple[Base, ...]:
        """Under which bases the engine's method reads passages, hence under which to warm them."""
        return self.method.bases or (FRAMED,)

    def capture(
        self,
        groups: Iterable[Sequence[str]],
        *,
        keep: Collection[str] = ("variant",),
        variants: int = 5,
        rank: int = 32,
    ) -> CaptureSummary:
        """Compute passages exactly behind those they were retrieved with, and keep what was born.

        It goes when one of the passages it was made of is gone from the store's sources, see `forget`.

        Args:
            groups: passages of one retrieval each, in the order they stood in.
            keep: `variant` for whole caches, `difference` for what they have over the framed ones, `patch` for that in
                low rank; see `ingestion.capture_job`.
            variants: most contexts to keep of each passage; beyond, one gives way, see `store.variant_slots`. A method looks
                at as many as its own `slots` or `anchors` say: give both the same number.
            rank: of patches.

        Raises:
            StoreError: if the store cannot be written.
            ValueError: if there is nothing of that name to keep, or no such rank.
        """
        job = CaptureJob(
            self.lm,
            self.store,
            self.prompts.prefix_ids,
            keep=keep,
            slots=variants,
            rank=rank,
            ledger=self._company.ledger(),
        )
        return job.run(self._company.permitted_group([self.prompts.chunk_ids(text) for text in group]) for group in groups)

    def keys(self, ids: tuple[int, ...], bases: Iterable[Base]) -> list[ChunkKey]:
        """Return the keys of a passage's token ids, one for each base; none of an empty passage."""
        return [base.key(self.lm.fingerprint, self.prompts.prefix_ids, ids) for base in bases] if ids else []

    @property
    def sources(self) -> Sources:
        """Which document's passages are in the store.

        Raises:
            StoreError: if the manifest cannot be opened.
        """
        with self._opening:
            if self._sources is None or self._sources.inherited:
                self._inherited = self._sources  # closing it here would be closing it for the process it is from
                self._sources = Sources(self.store)
                with suppress(StoreError):  # where the manifest can be read alone
                    if self._sources.unwanted:
                        self._sources.collect()
            return self._sources

    @cached_property
    def located(self) -> Located:
        """By what warmed passages are recognised in a text."""
        return Located(lambda: self.sources, self.lm.fingerprint)

    def forget(self, source: str) -> int:
        """Remove a document's passages from the store, in every tier; return how many entries that was.

        Passages that other documents have too stay.

        Raises:
            StoreError: if the store cannot be written.
        """
        return self.sources.forget(source)

    def prefetch(self, texts: Iterable[str], *, method: Method | None = None) -> None:
        """Start bringing passages into the store's nearest tier; returns at once."""
        self.store.prefetch(self._keys_of(texts, method))

    def hint_next(self, texts: Iterable[str], *, steps: int = 1, method: Method | None = None) -> None:
        """Say which passages will be asked for in so many requests from now; returns at once.

        For chains of questions whose next retrievals are known early, see `store.backends.hints`: passages are brought near, and
        kept there before others until they were used. Saying it again moves them; passages not stored are harmless.

        Raises:
            ValueError: if `steps` is less than 1.
        """
        self.store.hint(self._keys_of(texts, method), steps=steps)

    def _keys_of(self, texts: Iterable[str], method: Method | None) -> list[ChunkKey]:
        bases = (method or self.method).bases
        # A prompt's first passage may be taken from another base, the others are from the method's own.
        return [
            key
            for place, text in enumerate(texts)
            for key in self.keys(self.prompts.chunk_ids(text), bases if place == 0 else bases[:1])
        ]

    def prompt(
        self,
        question: str,
        passages: Sequence[str] = (),
        history: Sequence[Turn] = (),
        tools: Sequence[Tool] = (),
    ) -> Prompt:
        """Assemble a prompt from a question, retrieved passages in order, earlier turns, and tools to be called.

        Raises:
            InvalidTemplate: if the tokenizer's chat template does not take the history or shows no tools.
            PromptTooLong: if it is far beyond the context window; what exceeds it by less is refused by `prefill`.
        """
        self._require_short(question, *passages, *history, *tools)
        return self.prompts.build(question, passages, history, tools)

    def _require_short(self, *given: object) -> None:
        """Refuse what no tokenizer could make short enough, before it has taken seconds and gigabytes to find out.

        Raises:
            PromptTooLong: if there are more characters, all counted that a template may write, than a window of the
                longest tokens has.
        """
        count, window = sum(map(estimate_length, given)), self.lm.window.tokens
        if count > max(window * self.prompts.longest_token, QUICKLY_READ):
            raise PromptTooLong(
                f"a prompt of about {count:,} characters cannot fit a context window of {window:,} tokens"
            )

    def prompt_from_text(self, conversation: Sequence[Turn] | str, tools: Sequence[Tool] = ()) -> Prompt:
        """Build a prompt of what a framework has put together, in which warmed passages are found and reused.

        The token ids are those of the model's own pipeline, but that special tokens which messages spell are text: no
        message ends its turn. Passages may have been stripped, joined or indented; what
        is not found is computed like any text.

        Args:
            conversation: chat messages, or finished text: that gets its start token, and its special tokens are meant.
            tools: what the model may call, for chat messages; see `generation.tool_parsers`.

        Raises:
            InvalidTemplate: if the tokenizer's chat template does not take the messages or shows no tools.
            PromptTooLong: if it is far beyond the context window; what exceeds it by less is refused by `prefill`.
        """
        self._require_short(conversation, *tools)
        finished = isinstance(conversation, str)
        rendered = RenderedText(conversation) if isinstance(conversation, str) else self.prompts.render(conversation, tools)
        self._require_short(rendered.text)  # to which the template has added
        found, note = [], "no warmed passage was found in the text"
        try:
            found = self.located.find(rendered.text)
            note += f", of {self.located.count:,} that are known"
        except StoreError as error:
            note = f"{UNSOUGHT}: {error}"
        prompt = prompt_from_joined_text(self.prompts, rendered, found, begin=finished)
        return prompt if prompt.chunks else replace(prompt, note=note)

    def prefill(
        self, prompt: Prompt, *, method: Method | None = None, room: int = 0, pause: Pause | None = None
    ) -> Prefilled:
        """Bring a prompt to its first token; for measuring, and for decoding by other means.

        Args:
            prompt: from `prompt`.
            method: instead of the engine's own.
            room: tokens to reserve for the answer.
            pause: when to let others compute.

        Raises:
            PromptTooLong: if prompt and room exceed the context window.
        """
        chosen = method or self.method
        if self._shadow is not None and method is None:
            chosen = self._shadow.method(chosen)
        with self._activity.track():
            self.store.advance()
            self._follow()
            done = prefill(
                self.lm,
                self.store,
                prompt,
                chosen,
                room=room,
                costs=self.costs,
                loading=self._loading,
                pause=pause,
                passes=self.passes,
            )
        if self._shadow is not None and method is None:
            self._shadow.note(done)
        for observer in self._observers:
            try:
                observer(done.report)
            except Exception:
                LOG.exception("an observer of fused prefills failed; the answer is not affected")
        return done

    def _follow(self) -> None:
        """Let go of what other processes have removed from the store, as they noted in its manifest."""
        if self.store.folder is None:
            return
        with suppress(StoreError):  # then nothing is known of it, and chunks are still checked when they are read
            self._followed, gone = self.sources.gone_since(self._followed)
            if gone:
                self.store.drop_removed(gone)

    def observe(self, observer: Callable[[FusionReport], None]) -> None:
        """Have something called with the report of every prefill from now on, in the thread that computed it.

        Not of those in `answer_many` and `generate_speculative`, whose reports are in what they return. See `monitoring.tracing`
        for OpenTelemetry and `monitoring.metrics` for Prometheus. What it raises is logged.
        """
        self._observers = (*self._observers, observer)

    def compile(self) -> float:
        """Do now what the first request of a process would wait for; return the seconds it took.

        Kernels are compiled and compared with their references, the first passes of the process made, passes and
        decode steps recorded where there is a GPU, and the costs measured that the method's guard goes by, if there is
        something in the store to measure loading by. To be done before anything is asked.
        """
        started = time.perf_counter()
        run_first_passes(self.lm, self.prompts)
        self.passes.compile()
        self.step.compile()
        if self.method.guard is not None and any(tier.entries for tier in self.store.stats()):
            self.costs()
        return time.perf_counter() - started

    def watch(self, settings: ShadowSettings | None = None) -> Shadow:
        """Compare some requests with full prefill from now on, while none is being prefilled; see `monitoring.shadow`.

        Watched are requests that do not name a method of their own. An earlier watch ends.
        """
        if self._shadow is not None:
            self._shadow.close()
        self._shadow = Shadow(self.lm, self.store, settings or ShadowSettings(), self._activity.idle)
        return self._shadow

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        method: Method | None = None,
        cancel: threading.Event | None = None,
    ) -> TextStream:
        """Prefill now and return the answer as an iterator of pieces of text.

        Args:
            prompt: from `prompt`.
            sampling: how to choose tokens; greedy by default.
            method: instead of the engine's own.
            cancel: set it, from any thread, to end the answer before its next token.

        Raises:
            PromptTooLong: if prompt and answer exceed the context window.
            InvalidGrammar: if there is a grammar and it cannot be followed.
        """
        params = sampling or SamplingParams()
        sampler = Sampler(params, self.lm)  # a grammar that cannot be followed is known before anything is computed
        prefilled = self.prefill(prompt, method=method, room=params.max_new_tokens)
        return TextStream(self.lm, prefilled, params, cancel, sampler, self.step)

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        method: Method | None = None,
        cancel: threading.Event | None = None,
    ) -> Generation:
        """Answer a prompt; like `stream`, all at once."""
        return self.stream(prompt, sampling, method=method, cancel=cancel).result()

    def put_generated(self, stream: TextStream, text: str | None = None) -> Kept:
        """Keep the keys and values of an answer that will be a passage of later prompts; for method `relaycaching`.

        Only what was computed exactly is kept: ask with `method=make_method("full")`. It goes when one of the prompt's
        passages is gone from the store's sources, see `forget`.

        Args:
            stream: the answer, from `stream`; finished if it is not.
            text: the passage, which begins as the answer does; the answer itself if None.

        Returns:
            What was stored, or why nothing was.

        Raises:
            StoreError: if the store cannot be written.
        """
        generation = stream.result()
        passage = generation.text if text is None else text
        if stream.prefilled.prompt.joined and self.sources.restricted:
            return Kept(None, reason="it was given over a text that may hold passages not everybody may read")
        given = [span.segment.stored_ids for span in stream.prefilled.prompt.chunks]
        answer = self.prompts.chunk_ids(passage)
        if len(self._company.permitted_group([*given, answer])) <= len(given):
            return Kept(None, reason="it was given over a passage that not all who may read it may read")
        return keep_generated(
            self.lm, self.store, self.prompts, stream.prefilled, generation.ids, passage, ledger=self._company.ledger()
        )

    def generate_speculative(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, method: Method | None = None, draft: int = 25
    ) -> SpeculativeGeneration:
        """Answer as full prefill would, token for token, drafting on the fused cache; see `generation.speculative`."""
        self.store.advance()
        return generate_speculative(
            self.lm,
            self.store,
            prompt,
            method or self.method,
            sampling or SamplingParams(),
            draft=draft,
            loading=self._loading,
            passes=self.passes,
        )

    def answer_many(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        method: Method | None = None,
        progress: Progress | None = None,
    ) -> list[Generation]:
        """Answer prompts as if one by one, doing once what they begin with in common; see `generation.batch`."""
        params = sampling or SamplingParams()
        return answer_many(
            self.lm,
            self.store,
            prompts,
            method or self.method,
            params,
            progress=progress,
            loading=self._loading,
            passes=self.passes,
            step=self.step,
        )

    def close(self) -> None:
        """Stop watching and close the store, also one that was handed over."""
        if self._shadow is not None:
            self._shadow.close()
        if self._sources is not None and not self._sources.inherited:
            self._sources.close()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
