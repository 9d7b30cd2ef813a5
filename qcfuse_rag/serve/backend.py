"""From a request to the events of its answer: what an endpoint asks, wherever the engine is."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from qcfuse_rag.engine import FusionEngine
from qcfuse_rag.errors import Busy, QCFuseError
from qcfuse_rag.generate.answer_form import AnswerReader
from qcfuse_rag.generate.call_syntax import ToolReply
from qcfuse_rag.generate.decode import Generation
from qcfuse_rag.generate.sampling import SamplingParams
from qcfuse_rag.generate.scheduled import ScheduledAnswer
from qcfuse_rag.generate.served import AnswerRequest, ServedEngine
from qcfuse_rag.prompt.segments import Prompt
from qcfuse_rag.serve.request import ChatRequest

LOG = logging.getLogger(__name__)
PREPARING = 32
"""Requests that are tokenised at a time."""

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
        served: the engine behind its scheduler.
        name: how clients call the model.
        most_tokens: of an answer.
    """

    def __init__(self, served: ServedEngine, name: str, *, most_tokens: int = 4096) -> None:
        self.name, self._served, self._most_tokens = name, served, most_tokens
        self._preparing = 0

    def ready(self) -> str | None:
        """Return why nothing can be answered, or None. Trouble with the store is not a reason: see `qcfuse store`."""
        return None if self._served.scheduler.alive else "the scheduler has ended"

    async def answer(self, request: ChatRequest) -> AsyncIterator[Event]:
        """Answer a request; what is wrong with it is an event too."""
        try:
            request.refuse_unanswerable()
            form, sampling = request.form, request.sampling(self._most_tokens)

            def asked(engine: FusionEngine) -> tuple[Prompt, SamplingParams]:
                prompt = request.prompt(engine)
                room = max(1, engine.lm.window.tokens - len(prompt))
                most = sampling.max_new_tokens if request.says_how_long else min(room, sampling.max_new_tokens)
                return prompt, form.sampling(replace(sampling, max_new_tokens=most), engine.lm.tokenizer)

            answer = await self._ask(asked)
            try:
                reader = AnswerReader(self._served.engine.lm.tokenizer, form)
                async for piece in answer:
                    if text := reader.show(piece):
                        yield Event(text)
            finally:
                answer.cancel()
            assert answer.generation is not None
            yield last_event(*reader.end(answer.generation), answer.generation)
        except Busy as error:
            yield Event(status=429, error=str(error))
        except (QCFuseError, ValueError) as error:
            yield Event(status=400, error=str(error))
        except Exception as error:
            LOG.exception("a request failed")
            yield Event(status=500, error=f"the server failed: {type(error).__name__}")

    async def _ask(self, asked: AnswerRequest) -> ScheduledAnswer:
        """Queue a request; one that cannot even be tokenised for others is refused."""
        if self._preparing >= PREPARING:
            raise Busy(f"{self._preparing} requests are being prepared already; ask again later")
        self._preparing += 1
        try:
            return await self._served.ask_aside(asked)
        finally:
            self._preparing -= 1

    def close(self) -> None:
        """Finish what is being answered, then let go of the engine."""
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
        report=generation.report.to_dict(),
    )
