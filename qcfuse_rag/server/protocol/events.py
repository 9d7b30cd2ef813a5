"""Answers as events: plain data in OpenAI's terms, without third-party error text."""

from __future__ import annotations

import json
import logging
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from qcfuse_rag.engine.request import RequestHandle
from qcfuse_rag.fusion.report import FusionReport, Lookup, describe_misses
from qcfuse_rag.generation.completion import FinishReason, end_tokens
from qcfuse_rag.generation.decoding import FINISH_REASONS, Generation
from qcfuse_rag.generation.logprobs import content_logprobs
from qcfuse_rag.generation.reasoning import Delta
from qcfuse_rag.generation.tool_parsers import ParsedResponse
from qcfuse_rag.prompts.recognition import UNSOUGHT
from qcfuse_rag.runtime.language_model import LanguageModel

LOG = logging.getLogger(__name__)

SAFE_REASONS = ("absent:", "anchors disagree:", "fix overhead")
"""Beginnings of reasons that contain only this library's words, also after a colon."""


@dataclass(frozen=True, slots=True)
class Event:
    """A piece of an answer, as plain data that can be sent between processes.

    Answers come one after another. Reasoning is apart from the text. Tool calls and finish reason come with the last
    event of an answer, in OpenAI's format, as logarithmic probabilities are. Usage, the first prompt's report, and an
    explanation for requests that ask for one come with the last event of all. An HTTP status other than 200 makes an
    event the last one. The first event names the retrieved documents, if the server retrieved them.
    """

    text: str = ""
    reasoning: str = ""
    documents: list[dict[str, Any]] | None = None
    index: int = 0
    logprobs: list[dict[str, Any]] | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    report: dict[str, Any] | None = None
    explanation: dict[str, Any] | None = None
    status: int = 200
    error: str | None = None


class AnswerTokens:
    """Takes the logarithmic probabilities of an answer's tokens as they come, in OpenAI's format."""

    def __init__(self, answer: RequestHandle, lm: LanguageModel) -> None:
        self._answer, self._tokenizer, self._end_tokens = answer, lm.tokenizer, end_tokens(lm)
        self._taken = 0

    def take(self) -> list[dict[str, Any]] | None:
        """Return those that were not taken yet, without the end token's; None if the request asks for none."""
        if self._answer.params.logprobs is None:
            return None
        entries = self._answer.logprobs[self._taken :]
        self._taken += len(entries)
        return content_logprobs((entry for entry in entries if entry.token not in self._end_tokens), self._tokenizer)


class PlainReader:
    """Reads an answer as text alone, as `ResponseReader` reads others."""

    def __init__(self) -> None:
        self._read = 0

    def push(self, piece: str) -> Delta:
        """Return a piece of the answer."""
        self._read += len(piece)
        return Delta(piece)

    def finish(self, generation: Generation) -> tuple[Delta, ParsedResponse]:
        """Return what was not returned yet, and the answer."""
        return Delta(generation.text[self._read :]), ParsedResponse(generation.text)


def last_event(rest: Delta, response: ParsedResponse, finish_reason: FinishReason) -> Event:
    """Return the last event of an answer, with what was not sent yet."""
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
        rest.text + broken,
        rest.reasoning,
        calls=calls,
        finish_reason="tool_calls" if calls else FINISH_REASONS[finish_reason],
    )


def total_usage(generations: list[Generation], answer_count: int) -> dict[str, Any]:
    """Return the token counts of a request; each prompt counts once for its `answer_count` answers."""
    firsts = [generation.usage for generation in generations[::answer_count]]
    read, written = sum(usage.input_tokens for usage in firsts), sum(len(generation.ids) for generation in generations)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(usage.reused_tokens for usage in firsts)},
    }


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
