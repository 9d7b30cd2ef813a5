"""Answer chat requests with an engine and return the answers as events."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import uuid
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.engine.engine_handle import AnswerRequest, EngineHandle, cancel_request
from qcfuse_rag.engine.request import RequestHandle
from qcfuse_rag.errors import Busy, QCFuseError
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.report import UNSOUGHT, FusionReport, Lookup, describe_misses
from qcfuse_rag.generation.decode import Generation
from qcfuse_rag.generation.reasoning import AnswerPiece
from qcfuse_rag.generation.response_format import ResponseFormat, ResponseReader
from qcfuse_rag.generation.sampling import Fidelity, SamplingParams
from qcfuse_rag.generation.tool_parsers import ParsedResponse
from qcfuse_rag.methods import make_method
from qcfuse_rag.monitoring.explain import PassageOrigin, explain_prefill
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.server.idle_warming import IdleWarming
from qcfuse_rag.server.request import ChatRequest

if TYPE_CHECKING:  # needs the extra `cli`
    from qcfuse_rag.server.library import ServedLibrary

LOG = logging.getLogger(__name__)

MAX_PREPARING = 2
"""Requests that are tokenised at a time, because tokenising takes memory and processors; other requests wait."""

FINISH_REASONS = {"end": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}
"""OpenAI's finish reasons for the library's."""

CLIENTS = "clients"
"""The source of passages that clients sent, by which they are forgotten."""

SAFE_REASONS = ("absent:", "anchors disagree:", "fix overhead")
"""Beginnings of reasons that contain only this library's words, also after a colon."""


@dataclass(frozen=True, slots=True)
class Event:
    """A piece of an answer, as plain data that can be sent between processes.

    Reasoning is apart from the text. Tool calls, finish reason and usage are in OpenAI's format; these and the
    prefill's report come only with the last event, as does an explanation of the prefill to requests that ask for one.
    An HTTP status other than 200 makes an event the last one. The first event names the retrieved documents, if the
    server retrieved them.
    """

    text: str = ""
    reasoning: str = ""
    documents: list[dict[str, Any]] | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    report: dict[str, Any] | None = None
    explanation: dict[str, Any] | None = None
    status: int = 200
    error: str | None = None


class Backend(Protocol):
    """Answers requests."""

    @property
    def name(self) -> str:
        """The model's name for clients."""

    def ready(self) -> str | None:
        """Return None if the backend can answer, else the reason why not."""

    def answer(self, request: ChatRequest) -> AsyncGenerator[Event, None]:
        """Answer a request; closing the generator cancels the request."""


@dataclass(slots=True)
class Passages:
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
        retrieve: whether to retrieve for requests without documents too.
        keep: warms passages that requests had and the store had not; None keeps none.
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
        keep: IdleWarming | None = None,
    ) -> None:
        self.name, self._handle = name, handle
        self._most_tokens, self._fidelity = most_tokens, fidelity
        self._max_requests, self._running = max_requests, 0
        self._library, self._retrieve, self._keep = library, retrieve, keep
        self._preparers = ThreadPoolExecutor(MAX_PREPARING, thread_name_prefix="qcfuse-prepare")

    def ready(self) -> str | None:
        """Return why no request can be answered, or None. Store errors do not count: see `qcfuse store`."""
        return None if self._handle.scheduler.alive else "the scheduler has ended"

    async def answer(self, request: ChatRequest) -> AsyncGenerator[Event, None]:
        """Answer a request that `refuse_unsupported` accepted; further errors in it are events too."""
        if self._max_requests is not None and self._running >= self._max_requests:
            yield Event(status=429, error=f"{self._running} requests are answered or waiting already; ask again later")
            return
        self._running += 1
        try:
            passages = Passages()
            response_format, answer = await self._submit(request, passages)
            documents = passages.retrieved
            try:
                reader = ResponseReader(self._handle.engine.lm.tokenizer, response_format, answer.prompt)
                async for piece in answer:
                    if any(read := reader.push(piece)):
                        yield Event(read.text, read.reasoning, documents)
                        documents = None
            finally:
                answer.cancel()
            assert answer.generation is not None
            if self._keep is not None and passages.texts and answer.generation.report.fallback is not None:
                self._keep.add(zip(passages.texts, passages.sources, strict=True))
            rest, response = reader.finish(answer.generation)
            if request.parallel_tool_calls is False:
                response = replace(response, calls=response.calls[:1])
            generation = replace(answer.generation, report=redact_report(answer.generation.report))
            last = replace(last_event(rest, response, generation), documents=documents)
            if request.explain:
                last = replace(last, explanation=await self._explain(answer, generation.report, passages))
            yield last
        except Busy as error:
            yield Event(status=429, error=str(error))
        except (QCFuseError, ValueError) as error:
            yield Event(status=400, error=str(error))
        except Exception as error:
            LOG.exception("a request failed")
            yield Event(status=500, error=f"the server failed: {type(error).__name__}")
        finally:
            self._running -= 1

    async def _submit(self, request: ChatRequest, passages: Passages) -> tuple[ResponseFormat, RequestHandle]:
        """Prepare and queue a request; return its response format and its coming answer, and fill in its passages."""
        try:
            sampling = request.sampling(self._most_tokens, self._fidelity)
            response_format = ResponseFormat()

            def prepare(engine: FusionEngine) -> tuple[Prompt, SamplingParams]:
                nonlocal response_format
                response_format = request.to_response_format()
                self._find_passages(request, passages)
                prompt = request.prompt(engine, passages.texts)
                remaining = max(1, engine.lm.window.tokens - len(prompt))
                limit = sampling.max_new_tokens
                if not request.has_token_limit:
                    limit = min(remaining, limit)
                return prompt, response_format.sampling(replace(sampling, max_new_tokens=limit), engine.lm.tokenizer)

            answer = await self._queue(prepare, None if request.method is None else make_method(request.method))
            return response_format, answer
        except RecursionError as error:
            raise QCFuseError("something in the body is nested too deeply") from error

    def _find_passages(self, request: ChatRequest, passages: Passages) -> None:
        """Fill in the passages of a request: its own, or those that the library has on its question.

        Raises:
            QCFuseError: if the request asks for retrieval and this server does not retrieve.
        """
        passages.texts = request.given_documents
        passages.sources = [CLIENTS] * len(passages.texts or ())
        if request.documents != "library" and not (self._retrieve and request.documents is None):
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

    async def _explain(self, answer: RequestHandle, report: FusionReport, passages: Passages) -> dict[str, Any]:
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
        if self._keep is not None:
            self._keep.close()
        self._handle.scheduler.close(drain=True)
        self._handle.close()


def last_event(rest: AnswerPiece, response: ParsedResponse, generation: Generation) -> Event:
    """Return the last event of an answer with a redacted report, and with what was not sent yet."""
    usage = generation.usage
    calls = [
        {
            "id": f"call_{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in response.calls
    ]
    # OpenAI's format has no field for broken calls, so they are sent as text.
    broken = "".join(call.text for call in response.broken)
    return Event(
        text=rest.text + broken,
        reasoning=rest.reasoning,
        calls=calls,
        finish_reason="tool_calls" if calls else FINISH_REASONS[generation.finish_reason],
        usage={
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.input_tokens + usage.output_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.reused_tokens},
        },
        report={**generation.report.to_dict(), "verified_upto": generation.verified_upto},
    )


def redact_report(report: FusionReport) -> FusionReport:
    """Return a report without third-party error text in its reasons; log that text instead.

    Third-party text follows a colon. It may name folders of a file system or hosts of a remote store, which clients
    must not see.
    """
    lookups = [redact_lookup(lookup) for lookup in report.lookups]
    fallback = report.fallback
    if fallback == describe_misses(list(report.lookups)):
        fallback = describe_misses(lookups)
    elif fallback is not None and fallback.startswith(UNSOUGHT):
        fallback = UNSOUGHT
    withheld = {lookup.reason for lookup in report.lookups} - {lookup.reason for lookup in lookups}
    withheld |= {report.fallback} - {fallback} if fallback == UNSOUGHT else set()
    if withheld:
        LOG.error("passages were not read: %s", "; ".join(sorted(map(str, withheld))))
    return replace(report, lookups=tuple(lookups), fallback=fallback)


def redact_lookup(lookup: Lookup) -> Lookup:
    """Return a lookup without third-party error text in its reason."""
    if lookup.reason is None or lookup.reason.startswith(SAFE_REASONS):
        return lookup
    return replace(lookup, reason=lookup.reason.partition(":")[0])
