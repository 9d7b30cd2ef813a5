"""From a request to the events of its answer: what an endpoint asks, wherever the engine is."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.engine.engine_handle import AnswerRequest, ServedEngine, cancel_answer
from qcfuse_rag.engine.request import ScheduledAnswer
from qcfuse_rag.errors import Busy, QCFuseError
from qcfuse_rag.generation.decode import Generation
from qcfuse_rag.generation.response_format import AnswerForm, AnswerReader
from qcfuse_rag.generation.sampling import SamplingParams
from qcfuse_rag.generation.tool_parsers import ToolReply
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.server.redact import told
from qcfuse_rag.server.request import ChatRequest

LOG = logging.getLogger(__name__)
PREPARING = 8
"""Requests that are tokenised at a time, which takes memory; the others wait for their turn."""

FINISH = {"end": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}


@dataclass(frozen=True, slots=True)
class Event:
    """A piece of an answer, as plain data, so that it can cross processes.

    Attributes:
        text: new text.
        calls: in the last event, the tools that are called, in OpenAI's words.
        finish: in the last event, why the answer is over.
        usage: in the last event, counts of tokens, in OpenAI's words.
        report: in the last event, what the prefill did.
        status, error: HTTP status and message of a request that failed; then it is the only event.
    """

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    usage: dict[str, Any] | None = None
    report: dict[str, Any] | None = None
    status: int = 200
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


class Backend(Protocol):
    """What answers requests."""

    @property
    def name(self) -> str:
        """How clients call the model."""

    def ready(self) -> str | None:
        """Return None if it can answer, else why not."""

    def answer(self, request: ChatRequest) -> AsyncIterator[Event]:
        """Answer a request; whoever stops reading cancels it."""


class EngineBackend:
    """Answers with an engine in this process.

    Args:
        served: the engine behind its scheduler, which lets as many requests wait as there may be.
        name: how clients call the model.
        most_tokens: of an answer.
        requests: most requests at a time, waiting ones included; one more is refused. None leaves that to whoever asks.
    """

    def __init__(
        self, served: ServedEngine, name: str, *, most_tokens: int = 4096, requests: int | None = None
    ) -> None:
        self.name, self._served, self._most_tokens = name, served, most_tokens
        self._requests, self._taken = requests, 0
        self._preparers = ThreadPoolExecutor(PREPARING, thread_name_prefix="qcfuse-prepare")

    def ready(self) -> str | None:
        """Return why nothing can be answered, or None. Trouble with the store is not a reason: see `qcfuse store`."""
        return None if self._served.scheduler.alive else "the scheduler has ended"

    async def answer(self, request: ChatRequest) -> AsyncIterator[Event]:
        """Answer a request that `refuse_unanswerable` let pass; what else is wrong with it is an event too."""
        if self._requests is not None and self._taken >= self._requests:
            yield Event(status=429, error=f"{self._taken} requests are answered or waiting already; ask again later")
            return
        self._taken += 1
        try:
            form, answer = await self._ask(request)
            try:
                reader = AnswerReader(self._served.engine.lm.tokenizer, form)
                async for piece in answer:
                    if text := reader.show(piece):
                        yield Event(text)
            finally:
                answer.cancel()
            assert answer.generation is not None
            rest, reply = reader.end(answer.generation)
            if request.parallel_tool_calls is False:
                reply = replace(reply, calls=reply.calls[:1])
            yield last_event(rest, reply, answer.generation)
        except Busy as error:
            yield Event(status=429, error=str(error))
        except (QCFuseError, ValueError) as error:
            yield Event(status=400, error=str(error))
        except Exception as error:
            LOG.exception("a request failed")
            yield Event(status=500, error=f"the server failed: {type(error).__name__}")
        finally:
            self._taken -= 1

    async def _ask(self, request: ChatRequest) -> tuple[AnswerForm, ScheduledAnswer]:
        """Queue a request when it has been prepared; return what its answer will be.

        Raises:
            QCFuseError: if there is something wrong with it.
        """
        try:
            form, sampling = request.form, request.sampling(self._most_tokens)

            def asked(engine: FusionEngine) -> tuple[Prompt, SamplingParams]:
                prompt = request.prompt(engine)
                room = max(1, engine.lm.window.tokens - len(prompt))
                most = sampling.max_new_tokens if request.says_how_long else min(room, sampling.max_new_tokens)
                return prompt, form.sampling(replace(sampling, max_new_tokens=most), engine.lm.tokenizer)

            return form, await self._prepared(asked)
        except RecursionError as error:
            raise QCFuseError("something in the body is nested too deep") from error

    async def _prepared(self, asked: AnswerRequest) -> ScheduledAnswer:
        """Have a request prepared and queued; one whose asker goes gives up its turn."""
        preparing = self._preparers.submit(contextvars.copy_context().run, self._served.ask, asked)
        try:
            return await asyncio.wrap_future(preparing)
        except asyncio.CancelledError:
            preparing.add_done_callback(cancel_answer)  # if it has begun, it cannot be stopped before it is queued
            raise

    def close(self) -> None:
        """Finish what is being answered, then let go of the engine."""
        self._preparers.shutdown(cancel_futures=True)
        self._served.scheduler.close(drain=True)
        self._served.close()


def last_event(rest: str, reply: ToolReply, generation: Generation) -> Event:
    """Return the end of an answer."""
    usage = generation.usage
    calls = [
        {
            "id": f"call_{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in reply.calls
    ]
    # What was meant as a call and is none is shown, since clients have no place for it.
    broken = "".join(call.text for call in reply.broken)
    return Event(
        text=rest + broken,
        calls=calls,
        finish="tool_calls" if calls else FINISH[generation.finish_reason],
        usage={
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.input_tokens + usage.output_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.reused_tokens},
        },
        report=told(generation.report),
    )
