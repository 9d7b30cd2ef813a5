"""A request in a scheduler: one thread or event loop reads its answer, the scheduler's thread writes it."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import CancelledError

from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import Parts, Prefilled
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.generation.completion import TokenLogprob
from qcfuse_rag.generation.decoding import Decoder, Generation, make_decoder
from qcfuse_rag.generation.sampling import Sampler
from qcfuse_rag.generation.sampling_params import SamplingParams
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.attention.scores import Scores
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.runner import ModelRunner


class RequestHandle(Iterator[str]):
    """The reader's side: iterate for pieces of text, with `for` or `async for`, or wait for the `result`.

    To stop reading does not end the answer; `cancel` does. Leaving an `async for` before its end cancels.

    Attributes:
        prompt, params, method: as submitted.
        report: the report of the prefill; None before it is done.
        scores: the scores of the prefill's probe; None before it is done, and if there was no probe.
        generation: the finished answer; None before that.
        decoder: the state of the running answer; None before and after that.
    """

    def __init__(self, prompt: Prompt, params: SamplingParams, method: Method | None) -> None:
        self.prompt, self.params, self.method = prompt, params, method
        self.report: FusionReport | None = None
        self.scores: Scores | None = None
        self.generation: Generation | None = None
        self.decoder: Decoder | None = None
        self._cancelled, self._finished = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._interruption: Exception | None = None
        self._pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._wake_reader: Callable[[], object] = lambda: None

    @property
    def is_cancelled(self) -> bool:
        """Whether the answer is to end before its next token."""
        return self._cancelled.is_set()

    @property
    def is_finished(self) -> bool:
        """Whether the answer has ended."""
        return self._finished.is_set()

    @property
    def verified_upto(self) -> int | None:
        """Number of leading tokens so far that are known to be full prefill's greedy tokens; None if nothing is yet."""
        source = self.generation or self.decoder
        return None if source is None else source.verified_upto

    @property
    def logprobs(self) -> Sequence[TokenLogprob]:
        """The log probabilities of the answer's tokens so far, without a draft's; empty if none are asked for."""
        source = self.generation or self.decoder
        return () if source is None else source.logprobs or ()

    def cancel(self) -> None:
        """End the answer before its next token, from any thread; the text so far stays."""
        self._cancelled.set()

    def interrupt(self, error: Exception) -> None:
        """End the answer although its reader did not ask for that; unless the answer is complete, it fails.

        Args:
            error: raised to the reader of an incomplete answer.
        """
        if not self._cancelled.is_set():
            self._interruption = error
        self._cancelled.set()

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the whole answer.

        Raises:
            TimeoutError: if it is not finished after `timeout` seconds.
            QCFuseError: whatever its prefill raised, or `Closed` if the scheduler was closed before it was complete.
            CancelledError: if it was cancelled before it began.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"no answer after {timeout:g} seconds")
        return self._outcome()

    async def aresult(self) -> Generation:
        """Wait for the whole answer like `result`, without blocking the event loop; a cancelled task cancels it."""
        async for _ in self:
            pass
        return self._outcome()

    def __next__(self) -> str:
        piece = None if self._finished.is_set() and self._pieces.empty() else self._pieces.get()
        if piece is None:
            self._outcome()
            raise StopIteration
        return piece

    async def __aiter__(self) -> AsyncIterator[str]:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        self._wake_reader = lambda: loop.call_soon_threadsafe(ready.set)
        try:
            while True:
                ready.clear()
                finished = self._finished.is_set()  # read first: pieces that come later are read in the next turn
                while not self._pieces.empty():
                    piece = self._pieces.get()
                    if piece is not None:
                        yield piece
                if finished:
                    self._outcome()
                    return
                await ready.wait()
        finally:
            self.cancel()

    def put(self, piece: str) -> None:
        """Hand a piece of text to the reader."""
        if piece:
            self._pieces.put(piece)
            self._notify()

    def end(self, generation: Generation | None, error: Exception | None) -> None:
        """Hand the finished answer, or the reason why there is none, to the reader."""
        self.generation, self._error, self.decoder = generation, error, None
        self._finished.set()
        self._pieces.put(None)
        self._notify()

    def _notify(self) -> None:
        try:
            self._wake_reader()
        except RuntimeError:  # the reader's event loop is closed
            self.cancel()

    def _outcome(self) -> Generation:
        """Return the finished answer, or raise the reason why there is none."""
        if self._error is not None:
            raise self._error
        complete = self.generation is not None and self.generation.finish_reason != "cancelled"
        if self._interruption is not None and not complete:
            raise self._interruption
        if self.generation is None:
            raise CancelledError("the request was cancelled before it began")
        return self.generation


class RunningRequest:
    """The scheduler's side: the prefill of a request in parts, then its decoder.

    Attributes:
        prompt, params, method: as submitted.
        handle: the reader's side.
        rows_left: rows of the prompt that are still to be computed; predicted before the prefill begins.
        part_rows: most rows of the next part of its prefill.
        parts: number of parts of its prefill so far; the first one only loads, if there are several.
    """

    def __init__(self, lm: LanguageModel, prompt: Prompt, params: SamplingParams, method: Method | None) -> None:
        self.prompt, self.params, self.method = prompt, params, method
        self.handle = RequestHandle(prompt, params, method)
        self.rows_left = len(prompt)
        self.part_rows = self.parts = 0
        self._context = contextvars.copy_context()  # the caller's, so that traces are connected
        self._prefill: Parts[Prefilled] | None = None
        self._sampler = Sampler(params, lm)
        self._started = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of its buffer: prompt and longest answer."""
        return len(self.prompt) + self.params.max_new_tokens

    @property
    def decoder(self) -> Decoder:
        """The state of the running answer."""
        assert self.handle.decoder is not None
        return self.handle.decoder

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.handle.is_finished

    @property
    def begun(self) -> bool:
        """Whether its prefill has begun."""
        return self._prefill is not None

    def begin(self, prefill: Parts[Prefilled]) -> None:
        """Take the prefill of its prompt, of which nothing is computed yet."""
        self._prefill = prefill

    def end_if_cancelled(self) -> bool:
        """End the request if it was cancelled; return whether it has ended."""
        if self.handle.is_cancelled and not self.finished:
            self._end()
        return self.finished

    def compute_part(self, runner: ModelRunner) -> bool:
        """Compute a part of the prompt; after the last one begin to decode, and return True."""
        assert self._prefill is not None
        self.parts += 1
        try:
            self.rows_left = self._context.run(next, self._prefill)
        except StopIteration as finished:
            prefilled: Prefilled = finished.value
            self.handle.report, self.handle.scores = prefilled.report, prefilled.scores
            self._started = time.perf_counter()
            self.handle.decoder = make_decoder(runner, prefilled, self.params, self._sampler)
            return True
        return False

    def advance(self) -> bool:
        """Choose the next token, if its logits are there; return whether the answer goes on."""
        try:
            self.handle.put(self.decoder.cancel() if self.handle.is_cancelled else self.decoder.choose())
        except Exception as error:
            self.fail(error)
            return False
        if self.decoder.finish_reason is not None:
            self._end()
        return not self.finished

    def fail(self, error: Exception) -> None:
        """End the request with an error, which its reader gets; free the tensors that the error's frames hold."""
        traceback.clear_frames(error.__traceback__)
        self._end(error)

    def _end(self, error: Exception | None = None) -> None:
        if self._prefill is not None:
            self._context.run(self._prefill.close)  # frees the buffer of an unfinished one
        generation = None
        if self.handle.decoder is not None and error is None:
            self.handle.put(self.decoder.completion.finish())
            generation = self.decoder.finish(time.perf_counter() - self._started)
        self.handle.end(generation, error)
