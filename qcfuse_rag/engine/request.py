"""A request in a scheduler: one thread or event loop reads its answer, the scheduler's thread writes it."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError

from torch import Tensor

from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.generation.decode import Generation
from qcfuse_rag.generation.sampling import Sampler, SamplingParams
from qcfuse_rag.generation.stop_criteria import PartialAnswer
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.language_model import LanguageModel


class RequestHandle(Iterator[str]):
    """Iterate for pieces of text, with `for` or `async for`, or wait for the `result`.

    To stop reading does not end the answer; `cancel` does. Leaving an `async for` before its end cancels.

    Attributes:
        prompt, params, method: as submitted.
        context: the context variables of the caller, in which the prompt is prefilled, so that traces are connected.
        report: the report of the prefill; None before it is done.
        generation: the finished answer; None before that.
    """

    def __init__(self, lm: LanguageModel, prompt: Prompt, params: SamplingParams, method: Method | None) -> None:
        self.prompt, self.params, self.method = prompt, params, method
        self.context = contextvars.copy_context()
        self.report: FusionReport | None = None
        self.generation: Generation | None = None
        self._answer = PartialAnswer(lm, params)
        self._sampler = Sampler(params, lm)
        self._prefilled: Prefilled | None = None
        self._logits: Tensor | None = None
        self._started = 0.0
        self._cancelled = threading.Event()
        self._finished = threading.Event()
        self._error: Exception | None = None
        self._interruption: Exception | None = None
        self._pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._wake_reader: Callable[[], object] = lambda: None

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
            TimeoutError: if it is not finished after so many seconds.
            QCFuseError: whatever its prefill raised, or `Closed` if the scheduler was closed before it was complete.
            CancelledError: if it was cancelled before it began.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"no answer after {timeout:g} seconds")
        return self._outcome()

    async def aresult(self) -> Generation:
        """Wait for the whole answer without blocking the event loop; a cancelled task cancels the request.

        Raises:
            QCFuseError: whatever its prefill raised, or `Closed` if the scheduler was closed before it was complete.
            CancelledError: if it was cancelled before it began.
        """
        async for _ in self:
            pass
        return self._outcome()

    def __next__(self) -> str:
        if self._finished.is_set() and self._pieces.empty():
            self._outcome()
            raise StopIteration
        piece = self._pieces.get()
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

    # Only the scheduler's thread uses the members below.

    @property
    def tokens(self) -> int:
        """Tokens of its buffer: prompt and longest answer."""
        return len(self.prompt) + self.params.max_new_tokens

    @property
    def last_token(self) -> int:
        """The token to continue from."""
        return self._answer.ids[-1]

    @property
    def position(self) -> int:
        """Position of the last token."""
        return len(self.prompt) + len(self._answer.ids) - 1

    @property
    def buffer(self) -> KVBuffer:
        """Keys and values of prompt and answer."""
        assert self._prefilled is not None
        return self._prefilled.buffer

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self._finished.is_set()

    def end_if_cancelled(self) -> bool:
        """End the request if it was cancelled; return whether it has ended."""
        if self._cancelled.is_set() and not self._finished.is_set():
            self._end()
        return self._finished.is_set()

    def start(self, prefilled: Prefilled) -> None:
        """Begin to decode a prefilled prompt."""
        self._prefilled, self._logits, self.report = prefilled, prefilled.logits, prefilled.report
        self._started = time.perf_counter()

    def advance(self) -> bool:
        """Choose the next token; return whether another one follows."""
        if self._cancelled.is_set():
            self._answer.finish_reason = "cancelled"
        else:
            assert self._logits is not None
            try:
                self._emit(self._answer.push(self._sampler(self._logits)))
            except Exception as error:
                self.fail(error)
                return False
        if self._answer.finish_reason is not None:
            self._end()
        return self._answer.finish_reason is None

    def set_logits(self, logits: Tensor) -> None:
        """Take the logits of the token after the last one."""
        self._logits = logits

    def fail(self, error: Exception) -> None:
        """End the request with an error, which its reader gets; free the tensors that the error's frames hold."""
        traceback.clear_frames(error.__traceback__)
        self._error = error
        self._end()

    def _end(self) -> None:
        prefilled, self._prefilled, self._logits = self._prefilled, None, None  # frees the buffer
        if prefilled is not None and self._error is None:
            self._emit(self._answer.finish())
            elapsed = time.perf_counter() - self._started
            ids = tuple(self._answer.ids)
            reason = self._answer.finish_reason
            assert reason is not None
            self.generation = Generation(self._answer.text, ids, reason, prefilled.report, elapsed)
        self._finished.set()
        self._pieces.put(None)
        self._notify()

    def _emit(self, piece: str) -> None:
        if piece:
            self._pieces.put(piece)
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
