"""Continue a prefilled prompt token by token."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.generation.decoder import AnswerDecoder, HealingReport
from qcfuse_rag.generation.logprobs import TokenLogprob, content_logprobs
from qcfuse_rag.generation.sampling import Sampler
from qcfuse_rag.generation.sampling_params import SamplingParams
from qcfuse_rag.generation.stop_criteria import FinishReason
from qcfuse_rag.runtime.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished answer.

    Attributes:
        text: the answer.
        ids: its tokens, the end token included.
        finish_reason: `end` for an end token, `stop` for a stop string, `length` for the token limit, or `cancelled`.
        report: of the prefill.
        decode_s: seconds from the first token's logits to the last token; of a stream, from the first read on.
        healing: what healing did; None for answers that are not healed.
        logprobs: of the tokens, one for each id; None if the request asked for none.
        passes: number of decode passes, see `AnswerDecoder`; fewer than tokens where candidates were right.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    report: FusionReport
    decode_s: float
    healing: HealingReport | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    passes: int = 0

    @property
    def verified_upto(self) -> int | None:
        """Number of leading tokens known to be full prefill's greedy tokens; None if nothing was verified."""
        return None if self.healing is None else self.healing.verified_upto

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "text": self.text,
            "tokens": len(self.ids),
            "finish_reason": self.finish_reason,
            "decode_s": self.decode_s,
            "passes": self.passes,
            "usage": asdict(self.usage),
            "verified_upto": self.verified_upto,
            "healing": None if self.healing is None else asdict(self.healing),
            "logprobs": None if self.logprobs is None else [asdict(token) for token in self.logprobs],
            "report": self.report.to_dict(),
        }

    def content_logprobs(self, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]] | None:
        """Return the logarithmic probabilities in OpenAI's format, without that of the end token, which is no content.

        See `logprobs.content_logprobs`; None if the request asked for none.
        """
        if self.logprobs is None:
            return None
        return content_logprobs(self.logprobs[: -1 if self.finish_reason == "end" else None], tokenizer)

    @property
    def usage(self) -> Usage:
        """Token counts of the request."""
        report = self.report
        return Usage(report.prompt_tokens, len(self.ids), report.reused_tokens, len(report.selected))


FINISH_REASONS = {"end": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}
"""OpenAI's name for each way in which an answer without tool calls ends."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts: prompt, answer, reused from the store or an earlier request, recomputed although stored."""

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
        self._prefilled = prefilled
        self.generation: Generation | None = None
        self._decoder = AnswerDecoder(runner, prefilled, params, sampler or Sampler(params, runner.lm))
        self._pieces = self._decode(cancel or threading.Event())

    @property
    def prefilled(self) -> Prefilled:
        """The prompt with keys and values of prompt and answer, as far as they are healed.

        They take memory as long as the stream exists.
        """
        return replace(self._prefilled, buffer=self._decoder.buffer)

    @property
    def verified_upto(self) -> int | None:
        """Number of leading tokens so far that are known to be full prefill's greedy tokens; None if nothing is yet."""
        return self._decoder.verified_upto

    def __next__(self) -> str:
        return next(self._pieces)

    def result(self) -> Generation:
        """Read all remaining pieces and return the answer."""
        for _ in self:
            pass
        assert self.generation is not None
        return self.generation

    def _decode(self, cancel: threading.Event) -> Iterator[str]:
        started, decoder = time.perf_counter(), self._decoder
        while True:
            piece = decoder.cancel() if cancel.is_set() else decoder.choose()
            if piece:
                yield piece
            if decoder.finish_reason is not None:
                break
            decoder.compute()
        if last_piece := decoder.answer.finish():
            yield last_piece
        self.generation = finished_answer(decoder, self.report, time.perf_counter() - started)


def finished_answer(decoder: AnswerDecoder, report: FusionReport, decode_s: float) -> Generation:
    """Return the answer of a decoder that has a finish reason."""
    answer, reason = decoder.answer, decoder.finish_reason
    assert reason is not None
    decoder.retain()
    return Generation(
        answer.text, tuple(answer.ids), reason, report, decode_s, decoder.report(), decoder.logprobs, decoder.passes
    )
