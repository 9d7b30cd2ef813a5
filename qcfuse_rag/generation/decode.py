"""Continue a prefilled prompt token by token."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.generation.sampling import Sampler, SamplingParams
from qcfuse_rag.generation.stop_criteria import FinishReason, PartialAnswer
from qcfuse_rag.runtime.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished answer.

    Attributes:
        text: the answer.
        ids: its tokens, the end token included.
        finish_reason: `end` for an end token, `stop` for a stop string, `length` for the token limit, or `cancelled`.
        report: of the prefill.
        decode_s: seconds from the first token's logits to the last token.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    report: FusionReport
    decode_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "text": self.text,
            "tokens": len(self.ids),
            "finish_reason": self.finish_reason,
            "decode_s": self.decode_s,
            "usage": asdict(self.usage),
            "report": self.report.to_dict(),
        }

    @property
    def usage(self) -> Usage:
        """Token counts of the request."""
        report = self.report
        return Usage(report.prompt_tokens, len(self.ids), report.reused_tokens, len(report.selected))


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request: prompt, answer, reused from the store, recomputed although stored."""

    input_tokens: int
    output_tokens: int
    reused_tokens: int
    recomputed_tokens: int


class TextStream(Iterator[str]):
    """A streamed answer: iterate for pieces of text, then read `generation`.

    To abandon the answer, stop iterating; nothing runs in the background.

    Args:
        runner: the model; computes the decode steps.
        prefilled: the prompt.
        params: how to choose tokens and when to stop.
        cancel: ends the answer before its next token when set.
        sampler: replaces the sampler that `params` describes.

    Attributes:
        report: of the prefill; available at once.
        generation: the finished answer; None until the last piece was read.
        prefilled: keys and values of prompt and answer; they take memory as long as the stream exists.
    """

    def __init__(
        self,
        runner: ModelRunner,
        prefilled: Prefilled,
        params: SamplingParams,
        *,
        cancel: threading.Event | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self.report = prefilled.report
        self.prefilled = prefilled
        self.generation: Generation | None = None
        self._runner, self._params = runner, params
        self._pieces = self._decode(sampler or Sampler(params, runner.lm), cancel or threading.Event())

    def __next__(self) -> str:
        return next(self._pieces)

    def result(self) -> Generation:
        """Read all remaining pieces and return the answer."""
        for _ in self:
            pass
        assert self.generation is not None
        return self.generation

    def _decode(self, sampler: Sampler, cancel: threading.Event) -> Iterator[str]:
        started = time.perf_counter()
        answer = PartialAnswer(self._runner.lm, self._params)
        logits, position = self.prefilled.logits, self.report.prompt_tokens
        while True:
            if cancel.is_set():
                answer.finish_reason = "cancelled"
                break
            token = sampler(logits)
            piece = answer.push(token)
            if piece:
                yield piece
            if answer.finish_reason is not None:
                break
            logits = self._runner.decodes([token], [position], [self.prefilled.buffer])[0]
            position += 1
        last_piece = answer.finish()
        if last_piece:
            yield last_piece
        elapsed = time.perf_counter() - started
        self.generation = Generation(answer.text, tuple(answer.ids), answer.finish_reason, self.report, elapsed)
