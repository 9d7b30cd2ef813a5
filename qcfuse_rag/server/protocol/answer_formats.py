"""Answers in the formats of OpenAI's chat and text completions, whole and in pieces.

https://platform.openai.com/docs/api-reference/chat/object
https://platform.openai.com/docs/api-reference/completions/object
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from qcfuse_rag.server.protocol.events import Event


class AnswerFormat(Protocol):
    """Turns the events of one request into choices; keeps what is known of its earlier events.

    Attributes:
        kind: the `object` of a whole body.
        chunk_kind: the `object` of a piece.
        id_prefix: the beginning of ids.
    """

    kind: str
    chunk_kind: str
    id_prefix: str

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """Return the choice of an answer with these events, one or more."""

    def pieces(self, event: Event) -> list[dict[str, Any]]:
        """Return the choices that the next event of a stream adds."""


class ChatFormat:
    """The format of chat completions."""

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self) -> None:
        self._begun: set[int] = set()

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """Return the choice of an answer."""
        text, last = "".join(event.text for event in events), events[-1]
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if last.calls else "")}
        if reasoning := "".join(event.reasoning for event in events):
            message["reasoning_content"] = reasoning
        if last.calls:
            message["tool_calls"] = last.calls
        return _choice(last, {"message": message}, _content(all_logprobs(events)), last.finish_reason)

    def pieces(self, event: Event) -> list[dict[str, Any]]:
        """Return the choices of an event: its text, after the role if it is an answer's first; the end of an answer.

        Further fields of a chunk, such as tool calls, are in the choice with the finish reason.
        """
        delta: dict[str, Any] = {"reasoning_content": event.reasoning} if event.reasoning else {}
        if event.index not in self._begun:
            delta |= {"role": "assistant", "content": event.text}
            self._begun.add(event.index)
        elif event.text:
            delta["content"] = event.text
        choices = []
        if delta or event.logprobs:
            choices.append(_choice(event, {"delta": delta}, _content(event.logprobs)))
        if event.finish_reason is not None:
            calls = [{"index": index, **call} for index, call in enumerate(event.calls)]
            delta = {"tool_calls": calls} if calls else {}
            choices.append(_choice(event, {"delta": delta}, None, event.finish_reason))
        return choices


class CompletionFormat:
    """The format of text completions; pieces and whole bodies have the same fields."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self) -> None:
        self._characters: dict[int, int] = {}

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """Return the choice of an answer."""
        text, last = "".join(event.text for event in events), events[-1]
        return _choice(last, {"text": text}, self._columns(last.index, all_logprobs(events)), last.finish_reason)

    def pieces(self, event: Event) -> list[dict[str, Any]]:
        """Return the choice of an event."""
        logprobs = self._columns(event.index, event.logprobs)
        return [_choice(event, {"text": event.text}, logprobs, event.finish_reason)]

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


def all_logprobs(events: Sequence[Event]) -> list[dict[str, Any]] | None:
    """Return the logarithmic probabilities of all events; None if they have none."""
    if events[-1].logprobs is None:
        return None
    return [entry for event in events for entry in event.logprobs or ()]


def _content(entries: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    return None if entries is None else {"content": entries, "refusal": None}


def _choice(
    event: Event, content: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": event.index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
