"""Answer requests with an engine and return the answers as events."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.engine.engine_handle import AnswerRequest, EngineHandle, cancel_request
from qcfuse_rag.engine.request import RequestHandle
from qcfuse_rag.errors import Busy, Closed, QCFuseError
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.generation.decoding import Generation
from qcfuse_rag.generation.response_format import ResponseFormat, ResponseReader
from qcfuse_rag.generation.sampling_params import Fidelity, SamplingParams
from qcfuse_rag.methods import make_method
from qcfuse_rag.monitoring.explain import PassageOrigin, explain_prefill
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.server.idle_warming import CLIENTS, IdleWarming
from qcfuse_rag.server.protocol.chat_request import ChatRequest
from qcfuse_rag.server.protocol.events import AnswerTokens, Event, PlainReader, last_event, redact_report, total_usage
from qcfuse_rag.server.protocol.generation_request import GenerationRequest

if TYPE_CHECKING:  # needs the extra `cli`
    from qcfuse_rag.library.documents import ServedLibrary

LOG = logging.getLogger(__name__)

MAX_PREPARING = 2
"""Requests that are tokenised at a time, because tokenising takes memory and processors; other requests wait."""


class Backend(Protocol):
    """Answers requests."""

    @property
    def name(self) -> str:
        """The model's name for clients."""

    def ready(self) -> str | None:
        """Return None if the backend can answer, else the reason why not."""

    def answer(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Answer a request; closing the generator cancels the request."""


@dataclass(slots=True)
class RequestPassages:
    """The passages of a request, and the sources they are from.

    Attributes:
        texts: the passages; None to find them in the messages.
        sources: one for each text.
        retrieved: what the server retrieved, for the client; None if it did not.
        origins: the document of each retrieved text, for an explanation.
    """

    texts: list[str] | None = None
    sources: list[str] = field(default_factory=list)
    retrieved: list[dict[str, Any]] | None = None
    origins: dict[str, PassageOrigin] = field(default_factory=dict)


class EngineBackend:
    """Answers with an engine in this process.

    Args:
        handle: the engine with its scheduler; the scheduler's queue holds at least `max_requests` requests.
        name: the model's name for clients.
        most_tokens: length limit of an answer.
        fidelity: of requests that name none.
        max_requests: most requests at a time, waiting ones included; further requests get 429. None sets no limit here.
        library: retrieves passages for requests that ask for that; None refuses them.
        retrieve: whether to retrieve for requests without documents, too, unless the client has put some into messages.
        idle_warming: warms passages that requests had and the store had not; None warms none.
    """

    def __init__(
        self,
        handle: EngineHandle,
        name: str,
        *,
        most_tokens: int = 4096,
        fidelity: Fidelity = "fast",
        max_requests: int | None = None,
        library: ServedLibrary | None = None,
        retrieve: bool = False,
        idle_warming: IdleWarming | None = None,
    ) -> None:
        self.name, self._handle = name, handle
        self._most_tokens, self._fidelity = most_tokens, fidelity
        self._max_requests, self._running = max_requests, 0
        self._library, self._retrieve, self._idle_warming = library, retrieve, idle_warming
        self._preparers = ThreadPoolExecutor(MAX_PREPARING, thread_name_prefix="qcfuse-prepare")

    def ready(self) -> str | None:
        """Return why no request can be answered, or None. Store errors do not count: see `qcfuse store`."""
        return None if self._handle.scheduler.alive else "the scheduler has ended"

    async def answer(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Answer a request that `refuse_unsupported` accepted; further errors in it are events too."""
        count = request.prompt_count * request.answer_count
        if self._max_requests is not None and self._running + count > self._max_requests:
            yield Event(status=429, error=f"{self._running} requests are answered or waiting already; ask again later")
            return
        self._running += count
        started: list[RequestHandle] = []
        try:
            async with aclosing(self._events(request, started)) as events:
                async for event in events:
                    yield event
        except Busy as error:
            yield Event(status=429, error=str(error))
        except Closed as error:
            yield Event(status=503, error=str(error))
        except (QCFuseError, ValueError) as error:
            yield Event(status=400, error=str(error))
        except Exception as error:
            LOG.exception("a request failed")
            yield Event(status=500, error=f"the server failed: {type(error).__name__}")
        finally:
            for answer in started:
                answer.cancel()
            self._running -= count

    async def _events(self, request: GenerationRequest, started: list[RequestHandle]) -> AsyncGenerator[Event, None]:
        """Yield the events of all answers, one answer after another; put into `started` what has to be cancelled."""
        passages, response_format = RequestPassages(), None
        for number in range(request.prompt_count):
            response_format, first = await self._submit(request, passages, number)
            started.append(first)
        documents = passages.retrieved
        generations: list[Generation] = []
        lm = self._handle.engine.lm
        async with aclosing(self._answers(request, started)) as answers:
            async for answer in answers:
                tokens = AnswerTokens(answer, lm)
                reader: ResponseReader | PlainReader = PlainReader()
                if response_format is not None:
                    reader = ResponseReader(lm.tokenizer, response_format, answer.prompt)
                async for piece in answer:
                    if any(read := reader.push(piece)):
                        yield Event(
                            read.text, read.reasoning, documents, index=len(generations), logprobs=tokens.take()
                        )
                        documents = None
                assert answer.generation is not None
                rest, response = reader.finish(answer.generation)
                last = last_event(rest, request.allowed(response), answer.generation.finish_reason)
                last = replace(last, documents=documents, index=len(generations), logprobs=tokens.take())
                documents = None
                generations.append(answer.generation)
                if len(generations) == request.prompt_count * request.answer_count:
                    last = await self._with_totals(last, request, started[0], generations, passages)
                yield last

    async def _answers(
        self, request: GenerationRequest, started: list[RequestHandle]
    ) -> AsyncGenerator[RequestHandle, None]:
        """Yield the answers in order, those to the same prompt one after another.

        The further answers to a prompt begin when the first has been read to its end: the engine then has the prompt's
        keys and values in its cache of prefixes, and decodes these answers together.
        """
        for first in tuple(started):
            yield first
            others: list[RequestHandle] = []
            for number in range(1, request.answer_count):
                params = replace(first.params, seed=next_seed(first.params.seed, number))
                others.append(await self._queue(partial(_same_prompt, first.prompt, params), first.method))
                started.append(others[-1])
            for other in others:
                yield other

    async def _with_totals(
        self,
        last: Event,
        request: GenerationRequest,
        first: RequestHandle,
        generations: list[Generation],
        passages: RequestPassages,
    ) -> Event:
        """Return the last event of a request with the usage of all answers, and the report of the first one."""
        report = redact_report(generations[0].report)
        if self._idle_warming is not None:
            unknown = _unknown_passages(request, first.prompt, report, passages)
            self._idle_warming.add(await asyncio.to_thread(list, unknown))  # a long prompt may have thousands of parts
        return replace(
            last,
            usage=total_usage(generations, request.answer_count),
            report={**report.to_dict(), "verified_upto": generations[0].verified_upto},
            explanation=await self._explain(first, report, passages) if request.explain else None,
        )

    async def _submit(
        self, request: GenerationRequest, passages: RequestPassages, number: int
    ) -> tuple[ResponseFormat | None, RequestHandle]:
        """Prepare and queue a prompt of a request.

        Args:
            request: the request.
            passages: filled in.
            number: which of the prompts.

        Returns:
            The response format and the coming answer.
        """
        try:
            sampling = request.sampling(self._most_tokens, self._fidelity)
            response_format: ResponseFormat | None = None

            def prepare(engine: FusionEngine) -> tuple[Prompt, SamplingParams]:
                nonlocal response_format
                response_format = request.to_response_format(shows_tools=engine.prompts.chat_template.shows_tools)
                if isinstance(request, ChatRequest):
                    self._find_passages(request, passages)
                prompt = request.make_prompt(engine, passages.texts, number)
                remaining = max(1, engine.lm.context_window.tokens - len(prompt))
                limit = sampling.max_new_tokens
                if request.token_limit is None:
                    limit = min(remaining, limit)
                params = replace(sampling, max_new_tokens=limit)
                if response_format is not None:
                    params = response_format.sampling(params, engine.lm.tokenizer)
                return prompt, params

            answer = await self._queue(prepare, None if request.method is None else make_method(request.method))
            return response_format, answer
        except RecursionError as error:
            raise QCFuseError("something in the body is nested too deeply") from error

    def _find_passages(self, request: ChatRequest, passages: RequestPassages) -> None:
        """Fill in the passages of a request: its own, or those that the library has on its question.

        Raises:
            QCFuseError: if the request asks for retrieval and this server does not retrieve.
        """
        passages.texts = request.given_documents
        passages.sources = [CLIENTS] * len(passages.texts or ())
        asks = any(message.role == "user" for message in request.messages)
        retrieves = self._retrieve and asks and request.documents is None and not request.delimited_passages
        if request.documents != "library" and not retrieves:
            return
        if self._library is None:
            raise QCFuseError(
                "this server does not retrieve: send passages in `documents`, or serve a library, without Ray"
            )
        found = self._library.retrieve_for(*request.questions)
        passages.texts = [passage.text for passage in found]
        passages.sources = [passage.source for passage in found]
        passages.retrieved = [
            {"source": passage.source, "title": passage.title, "score": passage.score} for passage in found
        ]
        if request.explain:
            names = self._library.short_names(found)
            passages.origins = {
                passage.text: PassageOrigin(name, passage.title) for name, passage in zip(names, found, strict=True)
            }

    async def _explain(self, answer: RequestHandle, report: FusionReport, passages: RequestPassages) -> dict[str, Any]:
        """Explain the prefill of a finished answer, in a thread, because it decodes every token of the prompt."""
        prompts = self._handle.engine.prompts
        origins = {prompts.template.format_chunk(text): origin for text, origin in passages.origins.items()}
        explain = partial(
            explain_prefill,
            prompts.tokenizer,
            answer.prompt,
            report,
            None if answer.scores is None else answer.scores.mean,
            origins=[origins.get(span.segment.text) for span in answer.prompt.chunks],
        )
        return await asyncio.wrap_future(self._preparers.submit(explain))

    async def _queue(self, prepare: AnswerRequest, method: Method | None) -> RequestHandle:
        """Prepare a request in a thread and queue it; cancel it if its client disconnects meanwhile."""
        submit = partial(self._handle.submit, prepare, method=method)
        preparing = self._preparers.submit(contextvars.copy_context().run, submit)
        try:
            return await asyncio.wrap_future(preparing)
        except asyncio.CancelledError:
            preparing.add_done_callback(
                cancel_request
            )  # a running preparation cannot stop before it queues the request
            raise

    def close(self) -> None:
        """Finish the current answers, then release the engine."""
        self._preparers.shutdown(cancel_futures=True)
        if self._idle_warming is not None:
            self._idle_warming.close()
        self._handle.scheduler.close(drain=True)
        self._handle.close()


def next_seed(seed: int | None, number: int) -> int | None:
    """Return the seed `number` places after `seed`, in 64 bits with a sign; None if there is none."""
    return None if seed is None else (seed + number + (1 << 63)) % (1 << 64) - (1 << 63)


def _same_prompt(prompt: Prompt, params: SamplingParams, _: FusionEngine) -> tuple[Prompt, SamplingParams]:
    return prompt, params


def _unknown_passages(
    request: GenerationRequest, prompt: Prompt, report: FusionReport, passages: RequestPassages
) -> Iterable[tuple[str, str]]:
    """Yield text and source of the request's passages that the store may lack, also of those in its messages."""
    if report.fallback is not None:
        yield from zip(passages.texts or (), passages.sources, strict=True)
    if passages.texts is None and isinstance(request, ChatRequest):
        # A text that consists of known passages is no passage: clients send whole files, with other whitespace.
        known = [" ".join(span.segment.text.split()) for span in prompt.chunks]
        for text in request.delimited_passages:
            words = " ".join(text.split())
            if 2 * sum(len(part) for part in known if part in words) < len(words):
                yield text, CLIENTS
