"""Answers as events, without third-party error text, and as choices of OpenAI's chat and text completions.

https://platform.openai.com/docs/api-reference/chat/object
https://platform.openai.com/docs/api-reference/completions/object
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qcfuse_rag.engine.scheduler import RequestHandle
from qcfuse_rag.fusion.report import FusionReport, Lookup, describe_misses
from qcfuse_rag.generation.completion import FinishReason, content_logprobs, end_tokens
from qcfuse_rag.generation.decoding import FINISH_REASONS, Generation
from qcfuse_rag.generation.response_format import Delta
from qcfuse_rag.generation.tool_parsers import ParsedResponse
from qcfuse_rag.prompts.recognition import UNSOUGHT
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.server.protocol.failures import Failure

LOG = logging.getLogger(__name__)

SAFE_REASONS = ("absent:", "anchors disagree:", "fix overhead")
"""Beginnings of reasons that contain only this library's words, also after a colon."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer, as plain data that can be sent between processes; answers come one after another."""

    text: str = ""
    reasoning: str = ""  # apart from the text
    index: int = 0  # which of the answers
    logprobs: list[dict[str, Any]] | None = None  # in OpenAI's format; None if the request asks for none
    documents: list[dict[str, Any]] | None = None  # what the server retrieved, in the first piece of all
    finish_reason: str | None = None  # in OpenAI's terms, in the last piece of the answer


@dataclass(frozen=True, slots=True)
class LastPiece(Piece):
    """The last piece of an answer, with its calls of tools; the last piece of all has the other fields."""

    finish_reason: str | None = "stop"
    calls: list[dict[str, Any]] = field(default_factory=list)  # in OpenAI's format
    usage: dict[str, Any] | None = None  # of the whole request
    report: dict[str, Any] | None = None  # on the first prompt
    explanation: dict[str, Any] | None = None  # for requests that ask for one


@dataclass(frozen=True, slots=True)
class Queued:
    """The request was accepted and waits for its turn; `fingerprint` tells the model's weights from others."""

    fingerprint: str


Event = Queued | Piece | Failure


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


def join_pieces(pieces: Sequence[Piece]) -> LastPiece:
    """Return a whole answer as one piece."""
    first, last = pieces[0], pieces[-1]
    assert isinstance(last, LastPiece)
    logprobs = None if last.logprobs is None else [entry for piece in pieces for entry in piece.logprobs or ()]
    text, reasoning = "".join(piece.text for piece in pieces), "".join(piece.reasoning for piece in pieces)
    return replace(last, text=text, reasoning=reasoning, logprobs=logprobs, documents=first.documents)


def last_piece(rest: Delta, response: ParsedResponse, finish_reason: FinishReason) -> LastPiece:
    """Return the last piece of an answer, with what was not sent yet."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in response.calls
    ]
    # OpenAI's format has no field for broken calls, so they are sent as text.
    broken = "".join(call.text for call in response.broken)
    return LastPiece(
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
    lookups = [_redact_lookup(lookup) for lookup in report.lookups]
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


def _redact_lookup(lookup: Lookup) -> Lookup:
    if lookup.reason is None or lookup.reason.startswith(SAFE_REASONS):
        return lookup
    return replace(lookup, reason=lookup.reason.partition(":")[0])


class ChatFormat:
    """Turns the pieces of one request's answers into choices of chat completions; keeps what it has begun."""

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self) -> None:
        self._begun: set[int] = set()

    def whole(self, answer: LastPiece) -> dict[str, Any]:
        """Return the choice of a whole answer."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = answer.calls
        return _choice(answer, {"message": message}, _content(answer.logprobs), answer.finish_reason)

    def parts(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the choices of a piece: its text, after the role if it is an answer's first; the end of an answer.

        Further fields of a chunk, such as tool calls, are in the choice with the finish reason.
        """
        delta: dict[str, Any] = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        if piece.index not in self._begun:
            delta |= {"role": "assistant", "content": piece.text}
            self._begun.add(piece.index)
        elif piece.text:
            delta["content"] = piece.text
        choices = []
        if delta or piece.logprobs:
            choices.append(_choice(piece, {"delta": delta}, _content(piece.logprobs)))
        if isinstance(piece, LastPiece):
            calls = [{"index": index, **call} for index, call in enumerate(piece.calls)]
            delta = {"tool_calls": calls} if calls else {}
            choices.append(_choice(piece, {"delta": delta}, None, piece.finish_reason))
        return choices


class CompletionFormat:
    """Turns pieces into choices of text completions, like `ChatFormat`; parts and whole bodies have the same fields."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self) -> None:
        self._characters: dict[int, int] = {}

    def whole(self, piece: Piece) -> dict[str, Any]:
        """Return the choice of an answer or of a piece of it."""
        columns = self._columns(piece.index, piece.logprobs)
        return _choice(piece, {"text": piece.text}, columns, piece.finish_reason)

    def parts(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the choice of a piece."""
        return [self.whole(piece)]

    def _columns(self, index: int, entries: list[dict[str, Any]] | None) -> dict[str, Any] | None:
        """Return logarithmic probabilities as columns; offsets are characters from the beginning of the answer."""
        if entries is None:
            return None
        offsets = []
        for entry in entries:
            offsets.append(self._characters.get(index, 0))
            self._characters[index] = offsets[-1] + len(entry["token"])
        return {
            "text_offset": offsets,
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {other["token"]: other["logprob"] for other in (*entry["top_logprobs"], entry)} for entry in entries
            ],
        }


def _content(entries: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    return None if entries is None else {"content": entries, "refusal": None}


def _choice(
    piece: Piece, content: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": piece.index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


AnswerFormat = ChatFormat | CompletionFormat
