"""Decode: continue a prefilled prompt token by token."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import Tensor

from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.generation.sampling import Sampler, SamplingParams
from qcfuse_rag.generation.stop_criteria import Answer, FinishReason
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.decode_step import forward_step
from qcfuse_rag.runtime.language_model import LanguageModel

Step = Callable[[Sequence[int], Sequence[int], Sequence[KVBuffer]], Tensor]
"""`(tokens, positions, buffers) -> [B, vocabulary]` float32 logits: computes the next row of requests."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished answer.

    Attributes:
        text: the answer.
        ids: its tokens, the end token included.
        finish_reason: `end` of the text by the model, a `stop` string, the `length` limit, or `cancelled`.
        report: what the prefill did.
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
    """Token counts: the prompt's, the answer's, those reused from the store, those recomputed though stored."""

    input_tokens: int
    output_tokens: int
    reused_tokens: int
    recomputed_tokens: int


class TextStream(Iterator[str]):
    """An answer in the making: iterate for pieces of text, then read `generation`.

    Stopping to iterate is all it takes to abandon it; nothing runs in the background.

    Attributes:
        report: what the prefill did; there from the start.
        generation: the finished answer; None until the last piece has been taken.
        prefilled: keys and values of prompt and answer; they take their memory as long as the stream is held.
    """

    def __init__(
        self,
        lm: LanguageModel,
        prefilled: Prefilled,
        params: SamplingParams,
        cancel: threading.Event | None = None,
        sampler: Sampler | None = None,
        step: Step | None = None,
    ) -> None:
        self.report = prefilled.report
        self.prefilled = prefilled
        self.generation: Generation | None = None
        self._pieces = self._decode(
            lm,
            prefilled,
            params,
            sampler or Sampler(params, lm),
            cancel or threading.Event(),
            step or partial(forward_step, lm),
        )

    def __next__(self) -> str:
        return next(self._pieces)

    def result(self) -> Generation:
        """Take all remaining pieces and return the answer."""
        for _ in self:
            pass
        assert self.generation is not None
        return self.generation

    def _decode(
        self,
        lm: LanguageModel,
        prefilled: Prefilled,
        params: SamplingParams,
        sampler: Sampler,
        cancel: threading.Event,
        step: Step,
    ) -> Iterator[str]:
        started = time.perf_counter()
        answer = Answer(lm, params)
        logits, position = prefilled.logits, prefilled.report.prompt_tokens
        while True:
            if cancel.is_set():
                answer.reason = "cancelled"
                break
            token = sampler(logits)
            piece = answer.push(token)
            if piece:
                yield piece
            if answer.reason is not None:
                break
            logits = step([token], [position], [prefilled.buffer])[0]
            position += 1
        rest = answer.finish()
        if rest:
            yield rest
        elapsed = time.perf_counter() - started
        self.generation = Generation(answer.text, tuple(answer.ids), answer.reason, self.report, elapsed)
