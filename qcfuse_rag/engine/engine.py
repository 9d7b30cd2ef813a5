"""The engine: one model, one store and one prompt template; warm passages, answer questions."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from qcfuse_rag.bundled import default_model
from qcfuse_rag.engine.config import EngineConfig, VerdictPolicy, warn_caller
from qcfuse_rag.engine.corpus import Corpus, SystemPrefixes
from qcfuse_rag.engine.first_passes import measure_passes, run_first_passes
from qcfuse_rag.errors import Unverified, UnverifiedMethod
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import PartRows, Parts, Prefilled, answer_room, complete, fuse_in_parts
from qcfuse_rag.fusion.prefix_cache import PrefixCache
from qcfuse_rag.fusion.report import FusionReport, ReuseMonitor
from qcfuse_rag.generation.decoding import Generation, TextStream
from qcfuse_rag.generation.response_format import ReasoningFormat, ResponseFormat
from qcfuse_rag.generation.sampling import Sampler
from qcfuse_rag.generation.sampling_params import SamplingParams
from qcfuse_rag.ingestion.warm_job import WarmSummary
from qcfuse_rag.methods import choose_method
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.recognition import prompt_among_turns, prompt_from_text
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.prompts.template import PromptTemplate, Tool, Turn, as_mapping, turn_starts_of
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.factory import open_store
from qcfuse_rag.verification.exactness import check_exact_once
from qcfuse_rag.verification.verdict import Verdict, find_verdict, verdict_problem


def require_verdict(lm: LanguageModel, store: KVStore, method: Method, policy: VerdictPolicy) -> Verdict | None:
    """Return the verdict in a store's folder; without a passing one, warn, or raise `Unverified`, as the policy says.

    Full prefill needs no verdict. A store without a folder cannot keep a verdict, so there is no warning.
    """
    verdict = find_verdict(lm, store, method)
    problem = verdict_problem(verdict, method)
    if problem is not None and policy == "require":
        raise Unverified(problem)
    if problem is not None and policy == "warn" and store.folder is not None:
        warn_caller(problem, UnverifiedMethod)
    return verdict


LOG = logging.getLogger(__name__)


class FusionEngine:
    """Answers questions over passages whose keys and values were computed beforehand.

    Safe to use from several threads: a request's state is its own.

    Args:
        lm: the model.
        store: where passages' keys and values are kept; closed with the engine.
        template: wording of the prompt.
        method: what to reuse and what to recompute where a request names no method.
        load_limit_s, prefix_bytes: see `EngineConfig`.

    Attributes:
        prompts: builds prompts.
        prefixes: the finished requests that later prompts may begin with.
        corpus: the passages: warm, forget, prefetch, and the record of their documents.
        runner: the model's passes and decode steps, and their learned costs.
        verdict: the verdict of `qcfuse verify` on the method and this model, where `load` found one, or None.
    """

    def __init__(
        self,
        lm: LanguageModel,
        store: KVStore,
        *,
        template: PromptTemplate | None = None,
        method: Method | None = None,
        load_limit_s: float | None = EngineConfig.load_limit_s,
        prefix_bytes: int = 0,
    ) -> None:
        self.lm, self.store = lm, store
        self.method = method or choose_method()
        self.prompts = PromptBuilder(lm.tokenizer, template or PromptTemplate(), lm.context_window.tokens)
        self._system_prefixes = SystemPrefixes(lm, store)
        self.runner = ModelRunner(lm, store, load_limit_s=load_limit_s)
        self.corpus = Corpus(self.runner, self.prompts, self.method)
        self.prefixes = PrefixCache(prefix_bytes)
        self.runner.free_memory = self.prefixes.clear
        self.verdict: Verdict | None = None
        self._observers: tuple[Callable[[FusionReport], None], ...] = (ReuseMonitor(self.corpus.index.count).note,)

    @classmethod
    def load(
        cls,
        model: str | EngineConfig,
        *,
        store: str | Path | KVStore | None = None,
        method: str | Method | None = None,
        lm: LanguageModel | None = None,
        **options: Any,
    ) -> FusionEngine:
        """Load a model and open a store.

        Args:
            model: Hugging Face id, local folder or GGUF file; or all options.
            store: a folder, or an open store; see `EngineConfig` for None.
            method: default method, or its name. If it leaves its ratio to `qcfuse verify`, as `auto` does by default,
                it takes the ratio of a passing verdict in the store's folder.
            lm: the model, if it is loaded already.
            **options: the other fields of `EngineConfig`.

        Raises:
            ModelNotFound: if the model cannot be loaded.
            UnsupportedModel: if reuse would not be right for it, or the check fails.
            StoreError: if the store cannot be opened.
            Unverified: if a verdict is required and there is none that passed.
        """
        if isinstance(method, str):
            options["method"] = method
        config = replace(model, **options) if isinstance(model, EngineConfig) else EngineConfig(model=model, **options)
        template, chosen = config.wording, method if isinstance(method, Method) else config.chosen_method()
        lm = lm or LanguageModel.load(config.model or default_model(), **config.load_options())
        if config.check:
            check_exact_once(lm)
        opened = store if isinstance(store, KVStore) else open_store(store or config.store)
        try:
            verdict = require_verdict(lm, opened, chosen, config.verdict)
            engine = cls(
                lm,
                opened,
                template=template,
                method=chosen if verdict is None else verdict.applied(chosen),
                load_limit_s=config.load_limit_s,
                prefix_bytes=config.prefix_bytes,
            )
            engine.verdict = verdict
            if lm.device.type == "cuda" if config.compiled is None else config.compiled:
                engine.compile()
        except BaseException:
            if opened is not store:
                opened.close()
            raise
        return engine

    def over(self, store: KVStore, method: Method) -> FusionEngine:
        """Return an engine of this model and wording over another store, which it takes over."""
        return FusionEngine(self.lm, store, template=self.prompts.template, method=method)

    def warm(self, texts: Iterable[str], **options: Any) -> WarmSummary:
        """Prefill passages into the store, leaving alone those that are there; see `Corpus.warm` and `WarmSettings`."""
        return self.corpus.warm(texts, **options)

    def warm_prefix(
        self,
        system: str | None = None,
        tools: Sequence[Tool] = (),
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> WarmSummary:
        """Prefill a system message and tools, with which conversations begin, into the store.

        Their prompts load it as long as system message, tools and their order are the same. See `SystemPrefixes.warm`,
        and `prompt` for `chat_template_kwargs`.
        """
        return self._system_prefixes.warm(self.prompts.with_kwargs(chat_template_kwargs), system, tools)

    def forget(self, source: str) -> int:
        """Remove a document's passages from the store; return the number of removed entries. See `Corpus.forget`."""
        removed = self.corpus.forget(source)
        self.prefixes.clear()
        return removed

    def prompt(
        self,
        question: str,
        passages: Sequence[str] = (),
        history: Sequence[Turn] = (),
        tools: Sequence[Tool] = (),
        *,
        later: Sequence[Turn] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Assemble a prompt from a question, retrieved passages in order, earlier turns, and tools to be called.

        `later` are turns behind the question, such as the call of a tool and its result. Warmed passages in other turns
        than the question's are found and reused where they stand, see `prompt_from_text`.
        `chat_template_kwargs` sets variables of the model's chat template over those of the prompt template. If they
        change the text before the passages, passages that were warmed behind another text there are recomputed.

        Raises:
            InvalidTemplate: if the tokenizer's chat template does not take the history, shows no tools, or does not
                read one of these variables.
            PromptTooLong: if it is far beyond the context window; `prefill` refuses what exceeds it by less.
        """
        builder, find = self.prompts.with_kwargs(chat_template_kwargs), self.corpus.index.find
        prompt = prompt_among_turns(builder, find, question, passages, history, tools, later)
        prompt = self._with_turn_starts(prompt, self.prompts.template.turn_starts)
        return self._system_prefixes.with_system_prefix(builder, prompt, builder.turns("", (), history), tools)

    def prompt_from_text(
        self,
        conversation: Sequence[Turn] | str,
        tools: Sequence[Tool] = (),
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Build a prompt from text that a framework has put together; warmed passages in it are found and reused.

        The token ids are those of the model's own pipeline, with one exception: special tokens that messages spell are
        text, so no message ends its turn. Passages may have been stripped, joined or indented; text that is not found
        is computed.

        Args:
            conversation: chat messages, or finished text: it gets its start token, and its special tokens are meant.
            tools: what the model may call, for chat messages; see `generation.tool_parsers`.
            chat_template_kwargs: see `prompt`; for chat messages.

        Raises:
            InvalidTemplate: if the tokenizer's chat template does not take the messages, shows no tools, or does not
                read one of the variables; or if finished text is given with variables.
            PromptTooLong: if it is far beyond the context window; `prefill` refuses what exceeds it by less.
        """
        prompt = prompt_from_text(self.prompts, self.corpus.index.find, conversation, tools, chat_template_kwargs)
        if isinstance(conversation, str):
            return self._with_turn_starts(prompt, turn_starts_of(conversation))
        last = as_mapping(conversation[-1]) if conversation else {}
        if last.get("role") == "user":
            prompt = self._with_turn_starts(prompt, turn_starts_of(str(last.get("content"))))
        return self._system_prefixes.with_system_prefix(
            self.prompts.with_kwargs(chat_template_kwargs), prompt, conversation, tools
        )

    def _with_turn_starts(self, prompt: Prompt, turn_starts: tuple[str, ...]) -> Prompt:
        if not turn_starts:
            return prompt
        if (reasoning := ReasoningFormat.of(self.lm.tokenizer)) is not None:  # which may repeat the prompt
            in_answer = partial(reasoning.in_answer, self.lm.tokenizer, prompt.segments[-1].text)
            prompt = replace(prompt, in_answer=in_answer)
        return replace(prompt, turn_starts=turn_starts)

    def chat_prompt(
        self,
        turns: Sequence[Mapping[str, Any]],
        response_format: ResponseFormat,
        passages: Sequence[str] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Build the prompt of a conversation, whose last question mentions the schema that the answer must follow.

        Args:
            turns: messages for a chat template. The question is the last message of the user, or the last message if
                the user wrote none. Other messages, such as tool results, may follow.
            response_format: of the answer; its tools are shown.
            passages: passages to put before the question, with the RAG prompt. With None, warmed passages are found in
                the messages.
            chat_template_kwargs: see `prompt`.

        Raises:
            InvalidTemplate, PromptTooLong: as `prompt` does.
        """
        asked = max((index for index, turn in enumerate(turns) if turn["role"] == "user"), default=len(turns) - 1)
        history, later, kwargs = turns[:asked], turns[asked + 1 :], chat_template_kwargs
        question, tools = response_format.with_schema_hint(turns[asked]["content"]), response_format.visible_tools
        if passages is None:
            conversation = [*history, {**turns[asked], "content": question}, *later]
            return self.prompt_from_text(conversation, tools, chat_template_kwargs=kwargs)
        return self.prompt(question, passages, history, tools, later=later, chat_template_kwargs=kwargs)

    def prefill(self, prompt: Prompt, *, method: Method | None = None, answer_tokens: int = 0) -> Prefilled:
        """Bring a prompt to its first token; for measuring, and for decoding by other means.

        Nothing that an earlier request has computed is reused but what the store has. See `prefill_in_parts` for the
        arguments and errors.
        """
        return complete(self.prefill_in_parts(prompt, method=method, answer_tokens=answer_tokens))

    def prefill_in_parts(
        self,
        prompt: Prompt,
        *,
        method: Method | None = None,
        answer_tokens: int = 0,
        part_rows: PartRows | None = None,
        prefixes: PrefixCache | None = None,
    ) -> Parts[Prefilled]:
        """Bring a prompt to its first token, in parts between which other requests may compute.

        Args:
            prompt: from `prompt`.
            method: the engine's own by default.
            answer_tokens: tokens to reserve for the answer, as many as fit.
            part_rows: the most rows of a part; None for one part.
            prefixes: where to find the beginning of the prompt and to keep prompt and answer, which is done when the
                answer has ended; None for neither. A request with a method of its own does neither, because it
                compares: no answer may come from what the other one has computed.

        Raises:
            PromptTooLong: if the prompt exceeds the context window; a long answer is cut to what fits.
        """
        if self.corpus.evict_removed():
            self.prefixes.clear()
        lease = None if prefixes is None or method is not None else prefixes.lease(prompt, self.method)
        prefilled = yield from fuse_in_parts(
            self.runner, prompt, method or self.method, answer_tokens=answer_tokens, lease=lease, part_rows=part_rows
        )
        if lease is not None:
            lease.release()
        for observer in self._observers:
            try:
                observer(prefilled.report)
            except Exception:
                LOG.exception("an observer of fused prefills failed; the answer is not affected")
        return prefilled

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        method: Method | None = None,
        cancel: threading.Event | None = None,
    ) -> TextStream:
        """Prefill now and return the answer as an iterator of pieces of text.

        It is greedy, and by the engine's method, unless others are given. Set `cancel`, from any thread, to end it
        before its next token.

        Raises:
            PromptTooLong: if the prompt exceeds the context window; a long answer is cut to what fits.
            InvalidGrammar: if there is a grammar and it cannot be followed.
        """
        params = sampling or SamplingParams()
        sampler = Sampler(params, self.lm)  # refuses an impossible grammar before anything is computed
        asked = params.max_new_tokens
        params = replace(params, max_new_tokens=answer_room(self.lm, prompt, asked))
        parts = self.prefill_in_parts(prompt, method=method, answer_tokens=asked, prefixes=self.prefixes)
        return TextStream(self.runner, complete(parts), params, cancel=cancel, sampler=sampler)

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

    def compile(self) -> float:
        """Do now what the first request of a process would wait for; return the seconds it took.

        Kernels are compiled and compared with their references, the first passes of the process are made, passes and
        decode steps are recorded on a GPU, whose passes are timed for the method's guard. `load` calls it on a GPU;
        elsewhere call it before the first request.
        """
        started = time.perf_counter()
        run_first_passes(self.runner, self.prompts)
        self.runner.compile()
        if self.method.guard is not None:
            measure_passes(self.runner, self.prompts)
        return time.perf_counter() - started

    def observe(self, observer: Callable[[FusionReport], None]) -> None:
        """Call an observer with the report of every prefill from now on, in its thread; errors are logged."""
        self._observers = (*self._observers, observer)

    def close(self) -> None:
        """Drop finished requests, and close the store, also one that was handed over."""
        self.prefixes.clear()
        self.runner.costs.save()
        self.corpus.close()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
