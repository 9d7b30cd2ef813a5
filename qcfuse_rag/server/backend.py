"""Answer requests with an engine and return the answers as events."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.engine.scheduler import AnswerRequest, EngineHandle, RequestHandle, cancel_request
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.report import WINDOW_ENDS, FusionReport, describe_limit
from qcfuse_rag.generation.decoding import Generation
from qcfuse_rag.generation.response_format import Delta, ResponseFormat, ResponseReader
from qcfuse_rag.generation.sampling_params import Fidelity, SamplingParams
from qcfuse_rag.generation.tool_parsers import ParsedResponse
from qcfuse_rag.library.documents import ServedLibrary
from qcfuse_rag.methods import make_method
from qcfuse_rag.monitoring.explain import PassageOrigin, explain_prefill
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.server.idle_warming import CLIENTS, IdleWarming
from qcfuse_rag.server.protocol.chat_request import ChatRequest
from qcfuse_rag.server.protocol.events import (
    AnswerTokens,
    Event,
    LastPiece,
    Piece,
    Queued,
    last_piece,
    redact_report,
    total_usage,
)
from qcfuse_rag.server.protocol.failures import Failure, failure_of
from qcfuse_rag.server.protocol.generation_request import GenerationRequest

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
class Preparation:
    """What a request consists of once it is prepared: passages, their sources, and the answers' format."""

    texts: list[str] | None = None  # None to find passages in the messages
    sources: list[str] = field(default_factory=list)  # one for each text
    retrieved: list[dict[str, Any]] | None = None  # what the server retrieved, for the client; None if it did not
    origins: dict[str, PassageOrigin] = field(default_factory=dict)  # of each retrieved text, for an explanation
    response_format: ResponseFormat | None = None  # None if answers are text as it was decoded
    generation: int | None = None  # see `IdleWarming.add`


class EngineBackend:
    """Answers with an engine in this process.

    Args:
        handle: the engine with its scheduler; the scheduler's queue holds at least `max_requests` requests.
        name, most_tokens, fidelity: see `ServerSettings`.
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
            yield Failure(429, f"{self._running} requests are answered or waiting already; ask again later")
            return
        self._running += count
        started: list[RequestHandle] = []
        try:
            async with aclosing(self._pieces(request, started)) as pieces:
                async for piece in pieces:
                    yield piece
        except Exception as error:
            yield failure_of(error, request.PROMPT_FIELD)
        finally:
            for answer in started:
                answer.cancel()
            self._running -= count

    async def _pieces(self, request: GenerationRequest, started: list[RequestHandle]) -> AsyncGenerator[Event, None]:
        """Yield the pieces of all answers, one answer after another; put into `started` what has to be cancelled."""
        sampling, passages = request.sampling(self._most_tokens, self._fidelity), Preparation()
        method = None if request.method is None else make_method(request.method)
        for number in range(request.prompt_count):
            prepare = partial(self._prepare, request, sampling, passages, number)
            started.append(await self._queue(prepare, method))
        documents, generations, lm = passages.retrieved, list[Generation](), self._handle.engine.lm
        yield Queued(f"fp_{lm.fingerprint.digest[:12]}")
        async with aclosing(self._answers(request, started)) as answers:
            async for answer in answers:
                tokens, index = AnswerTokens(answer, lm), len(generations)
                response_format, reader = passages.response_format, None
                if response_format is not None:  # else the text is sent as it was decoded
                    reader = ResponseReader(lm.tokenizer, response_format, answer.prompt)
                async for text in answer:
                    if any(read := reader.push(text) if reader else Delta(text)):
                        yield Piece(read.text, read.reasoning, index, tokens.take(), documents)
                        documents = None
                assert answer.generation is not None
                rest, response = reader.finish(answer.generation) if reader else (Delta(), ParsedResponse(""))
                last = last_piece(rest, response, answer.generation.finish_reason)
                last = replace(last, documents=documents, index=index, logprobs=tokens.take())
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
                others.append(await self._queue(partial(lambda made, _: made, (first.prompt, params)), first.method))
                started.append(others[-1])
            for other in others:
                yield other

    async def _with_totals(
        self,
        last: LastPiece,
        request: GenerationRequest,
        first: RequestHandle,
        generations: list[Generation],
        passages: Preparation,
    ) -> LastPiece:
        """Return the last piece of a request with the usage of all answers, and the report of the first one."""
        report, asked, limit = redact_report(generations[0].report), request.token_limit, first.params.max_new_tokens
        if asked is not None and limit < asked:
            reason = "this server gives no more" if limit == self._most_tokens else WINDOW_ENDS
            report = replace(report, answer_limit=describe_limit(limit, asked, reason))
        if self._idle_warming is not None:
            unknown = _unknown_passages(request, first.prompt, report, passages)
            # In a thread, because a long prompt may have thousands of parts.
            self._idle_warming.add(await asyncio.to_thread(list, unknown), passages.generation)
        return replace(
            last,
            usage=total_usage(generations, request.answer_count),
            report={**report.to_dict(), "verified_upto": generations[0].verified_upto},
            explanation=await self._explain(first, report, passages) if request.explain else None,
        )

    def _prepare(
        self,
        request: GenerationRequest,
        sampling: SamplingParams,
        passages: Preparation,
        number: int,
        engine: FusionEngine,
    ) -> tuple[Prompt, SamplingParams]:
        """Return one of the prompts of a request, and how to sample its answers; fill in `passages`."""
        if self._idle_warming is not None and number == 0:
            passages.generation = self._idle_warming.generation()
        if isinstance(request, ChatRequest):
            self._find_passages(request, passages)
        prompt, response_format = request.make_prompt(engine, passages.texts, number)
        passages.response_format = response_format
        return prompt, sampling if response_format is None else response_format.sampling(sampling, engine.lm.tokenizer)

    def _find_passages(self, request: ChatRequest, passages: Preparation) -> None:
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
            {"source": passage.source, "title": passage.title, "score": passage.score}
            for passage in self._library.with_copies(found)
        ]
        if request.explain:
            names = self._library.short_names(found)
            passages.origins = {
                passage.text: PassageOrigin(name, passage.title) for name, passage in zip(names, found, strict=True)
            }

    async def _explain(self, answer: RequestHandle, report: FusionReport, passages: Preparation) -> dict[str, Any]:
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
            preparing.add_done_callback(cancel_request)  # it cannot stop before it has queued the request
            raise

    def close(self) -> None:
        """Take no more changes of the library, finish the current answers, then release the engine."""
        if self._library is not None:
            self._library.close()
        self._preparers.shutdown(cancel_futures=True)
        if self._idle_warming is not None:
            self._idle_warming.close()
        self._handle.scheduler.close(drain=True)
        self._handle.close()


def next_seed(seed: int | None, number: int) -> int | None:
    """Return the seed `number` places after `seed`, in 64 bits with a sign; None if there is none."""
    return None if seed is None else (seed + number + (1 << 63)) % (1 << 64) - (1 << 63)


def _unknown_passages(
    request: GenerationRequest, prompt: Prompt, report: FusionReport, passages: Preparation
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
