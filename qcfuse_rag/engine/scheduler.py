"""A scheduler of many requests on one engine: prefills in parts, decodes together, in one thread.

Continuous batching (Yu et al., Orca, OSDI 2022): a request joins the running batch as soon as it is prefilled and
leaves when it ends. Between two prefills, and between two parts of a long one (Agrawal et al., Sarathi-Serve, OSDI
2024), there are some decode steps, so new questions slow the running answers without stopping them. While a short
question waits for its first token there is one step after every other part: a burst of questions is prefilled soon,
and steps of more answers together take less time for each.

A part takes some tenths of a second. The next part is that of the request with the fewest rows left (shortest remaining
processing time, Schrage 1968), so a short question overtakes a long prompt; requests that need one part are equal and
go in the order of submission. Every few parts, one is the oldest request's, so nobody waits for ever. Between two
parts, requests whose readers have gone end. Frameworks hold an `EngineHandle`, which loads the model on first use.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Self

from annotated_types import Ge, Gt

from qcfuse_rag.background_thread import BackgroundThread
from qcfuse_rag.declared_options import check_limits
from qcfuse_rag.engine.config import EngineConfig
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import Busy, Closed, MisplacedSetting, QCFuseError
from qcfuse_rag.fusion.lookup import rows_if_stored
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import Parts, Prefilled, answer_room
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.generation.completion import TokenLogprob
from qcfuse_rag.generation.decoding import Decoder, ExactDecoder, Generation, make_decoder
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
        prompt, params, method: as submitted, but `max_new_tokens` is what fits.
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
        """Whether the request was cancelled or interrupted: its answer ends before the next token."""
        return self._cancelled.is_set()

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, in whatever way."""
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
        """End the answer although its reader did not ask for that; the reader of an incomplete one gets the error."""
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
        if self._error is not None:
            raise self._error
        complete = self.generation is not None and self.generation.finish_reason != "cancelled"
        if self._interruption is not None and not complete:
            raise self._interruption
        if self.generation is None:
            raise CancelledError("the request was cancelled before it began")
        return self.generation


class _RunningRequest:
    """The scheduler's side: the prefill of a request in parts, then its decoder."""

    def __init__(
        self, lm: LanguageModel, prompt: Prompt, params: SamplingParams, method: Method | None, asked_tokens: int
    ) -> None:
        self.prompt, self.params, self.method, self.asked_tokens = prompt, params, method, asked_tokens
        self.handle = RequestHandle(prompt, params, method)
        self.rows_left = len(prompt)  # still to be computed; predicted before the prefill begins
        self.part_rows = 0  # most rows of the next part of its prefill
        self.parts = 0  # so far; the first one only loads, if there are several
        self._context = contextvars.copy_context()  # the caller's, so that traces are connected
        self.prefill: Parts[Prefilled] | None = None
        self._sampler = Sampler(params, lm)
        self._started = 0.0

    @property
    def tokens(self) -> int:
        return len(self.prompt) + self.params.max_new_tokens

    @property
    def decoder(self) -> Decoder:
        assert self.handle.decoder is not None
        return self.handle.decoder

    @property
    def begun(self) -> bool:
        return self.prefill is not None

    def end_if_cancelled(self) -> bool:
        """End the request if it was cancelled; return whether it has ended."""
        if self.handle.is_cancelled and not self.handle.is_finished:
            self._end()
        return self.handle.is_finished

    def compute_part(self, runner: ModelRunner) -> bool:
        """Compute a part of the prompt; after the last one begin to decode, and return True."""
        assert self.prefill is not None
        self.parts += 1
        try:
            self.rows_left = self._context.run(next, self.prefill)
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
        return not self.handle.is_finished

    def fail(self, error: Exception) -> None:
        """End the request with an error, which its reader gets; free the tensors that the error's frames hold."""
        traceback.clear_frames(error.__traceback__)
        self._end(error)

    def _end(self, error: Exception | None = None) -> None:
        if self.prefill is not None:
            self._context.run(self.prefill.close)  # frees the buffer of an unfinished one
        generation = None
        if self.handle.decoder is not None and error is None:
            self.handle.put(self.decoder.completion.finish())
            generation = self.decoder.finish(time.perf_counter() - self._started)
        self.handle.end(generation, error)


MIN_PART_ROWS, MIN_LONE_PART_ROWS = 32, 64
"""Fewest rows of a part, while answers are running and while none is. A pass reads all weights, so a pass of fewer rows
takes about as long and delays a long prompt."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """How many requests at once.

    Attributes:
        active: most answers to decode together.
        waiting: most requests in the queue; further ones are refused.
        steps: decode steps between two prefills, or between two parts of one, while answers are running. While a
            request that needs only one part could begin, there is one step after every other part instead.
        rows: most rows of a prefill, or of healing, to compute between decode steps; methods with a layer hook compute
            all rows of a prefill at once.
        part_s: seconds that a part of a prefill should take. Parts have fewer rows where rows take longer, and more
            than `rows` if no answer is running.
        overtaken: one of every `overtaken` parts is the oldest request's; the other parts are those of the request with
            the fewest rows left.
        kv_bytes: most bytes of keys and values of begun requests together; None for no bound. A request that is
            larger by itself is answered alone.

    Raises:
        ValueError: if a number is too small.
    """

    active: Annotated[int, Ge(1)] = 16
    waiting: Annotated[int, Ge(1)] = 64
    steps: Annotated[int, Ge(1)] = 2
    rows: Annotated[int, Ge(1)] = 512
    part_s: Annotated[float, Gt(0)] = 0.25
    overtaken: Annotated[int, Ge(1)] = 4
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        check_limits(self)


class Scheduler:
    """Answers requests from any number of threads and event loops.

    Requests of equal length, and short ones, are taken in the order of submission. An error, a cancellation or a
    reader that stops reading ends that request alone. The engine is not closed.
    """

    def __init__(self, engine: FusionEngine, settings: SchedulerSettings | None = None) -> None:
        self._engine, self._settings = engine, settings or SchedulerSettings()
        self._queue: list[_RunningRequest] = []  # those that are not prefilled yet, in the order of submission
        self._parts, self._first_part_rows = 0, max(1, self._settings.rows // 2)
        self._active: list[_RunningRequest] = []
        self._changed = threading.Condition()
        self._closed = False
        self._turn = 0
        close = partial(self.close, drain=False)
        self._thread = BackgroundThread(self._run, name="qcfuse-scheduler", close=close)

    def submit(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, method: Method | None = None
    ) -> RequestHandle:
        """Queue a prompt, to be answered greedily by the engine's method unless others are given; returns at once.

        Raises:
            Busy: if the queue is full.
            PromptTooLong: if the prompt exceeds the context window; a long answer is cut to what fits.
            Closed: if the engine is closed.
        """
        params = sampling or SamplingParams()
        asked = params.max_new_tokens
        params = replace(params, max_new_tokens=answer_room(self._engine.lm, prompt, asked))
        request = _RunningRequest(self._engine.lm, prompt, params, method, asked)
        if method is None:
            reusable = self._engine.prefixes.reusable_tokens(prompt, self._engine.method)
            request.rows_left = rows_if_stored(prompt, self._engine.method, reusable)
        with self._changed:
            if self._closed:
                raise Closed("the engine is closed; load another one")
            if self.waiting >= self._settings.waiting:
                self._queue = [queued for queued in self._queue if queued.begun or not queued.end_if_cancelled()]
            if self.waiting >= self._settings.waiting:
                raise Busy(f"{self.waiting} requests are waiting already; ask again later")
            self._queue.append(request)
            self._changed.notify()
        return request.handle

    @property
    def waiting(self) -> int:
        """Number of requests whose prefill has not begun."""
        return sum(not request.begun for request in self._queue)

    @property
    def alive(self) -> bool:
        """Whether the thread runs; only `close` ends it."""
        return self._thread.is_alive()

    @property
    def active(self) -> int:
        """Number of running answers."""
        return len(self._active)

    @property
    def idle(self) -> bool:
        """Whether there is no request."""
        return not self._queue and not self._active

    def close(self, *, drain: bool = True, wait: bool = True) -> None:
        """Take no more requests; end and `wait` for the thread.

        With `drain` the submitted requests are answered first; else their readers get `Closed`.
        """
        with self._changed:
            self._closed = True
            if not drain:
                for request in (*self._queue, *self._active):
                    request.handle.interrupt(Closed("the engine was closed before the answer was whole"))
            self._changed.notify()
        if wait:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.close(drain=kind is None)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._active:
                    if self._closed:
                        return
                    self._changed.wait()
                request = self._next()
            if request is not None:
                self._compute_part(request)
            steps = self._parts % 2 if request is not None and self._short_waits() else self._settings.steps
            request = None  # keep no reference to a finished request
            for _ in range(steps):
                self._step()
                if not self._active:
                    break

    def _next(self) -> _RunningRequest | None:
        """Choose the request to prefill a part of; None if the limits allow none.

        Every `overtaken`-th part is the oldest request's. If it has no room then, no other request begins before it.
        """
        self._queue = [request for request in self._queue if not request.end_if_cancelled()]
        candidates = [request for request in self._queue if request.begun or self._has_room(request)]
        if not candidates:
            return None
        if (self._parts + 1) % self._settings.overtaken:
            chosen = min(candidates, key=lambda request: max(self._first_part_rows, request.rows_left))
        elif candidates[0] is self._queue[0]:
            chosen = candidates[0]
        else:
            return next((request for request in candidates if request.begun), None)
        self._parts += 1
        if not chosen.begun:
            self._begin(chosen)
        return chosen

    def _has_room(self, request: _RunningRequest) -> bool:
        begun = [*self._active, *(queued for queued in self._queue if queued.begun)]
        tokens = sum(other.tokens for other in begun) + request.tokens
        limit = self._settings.kv_bytes
        fits = not begun or limit is None or tokens * self._engine.lm.kv_bytes_per_token <= limit
        return fits and len(begun) < self._settings.active

    def _short_waits(self) -> bool:
        """Return whether a request that needs one part could begin."""
        with self._changed:
            return any(
                not request.begun and request.rows_left <= self._first_part_rows and self._has_room(request)
                for request in self._queue
            )

    def _begin(self, request: _RunningRequest) -> None:
        request.part_rows = self._first_part_rows
        request.prefill = self._engine.prefill_in_parts(
            request.prompt,
            method=request.method,
            answer_tokens=request.asked_tokens,
            part_rows=lambda: self._part_rows(request),
            prefixes=self._engine.prefixes,
        )

    def _part_rows(self, request: _RunningRequest) -> int:
        if self._active:
            return min(request.part_rows, self._settings.rows)
        is_timed = request.parts > 1
        return max(request.part_rows, MIN_LONE_PART_ROWS) if is_timed else request.part_rows

    def _compute_part(self, request: _RunningRequest) -> None:
        rows_left, began = request.rows_left, time.perf_counter()
        try:
            is_prefilled = request.compute_part(self._engine.runner)
        except Exception as error:
            request.fail(error)
            return
        if is_prefilled:
            with self._changed:
                self._queue.remove(request)
                self._active.append(request)
        elif request.parts > 1:  # the first part computes no rows
            rows_in_time = (rows_left - request.rows_left) * self._settings.part_s / (time.perf_counter() - began)
            request.part_rows = max(MIN_PART_ROWS, int(rows_in_time))
            if request.parts == 2:
                self._first_part_rows = request.part_rows

    def _step(self) -> None:
        continuing = [request for request in self._active if request.advance()]
        if len(continuing) == 1:
            try:
                continuing[0].decoder.compute()  # heals in the pass of its step
            except Exception as error:
                continuing[0].fail(error)
        elif continuing:
            self._heal(continuing)
            self._decode(
                [request for request in continuing if not request.handle.is_finished and request.decoder.needs_step]
            )
        self._active = [request for request in continuing if not request.handle.is_finished]

    def _decode(self, requests: list[_RunningRequest]) -> None:
        """Compute a step together; if that fails, compute the steps one by one to find the failing request."""
        if not requests:
            return
        decoders = [request.decoder for request in requests]
        try:
            logits = self._engine.runner.decodes(
                [decoder.completion.ids[-1] for decoder in decoders],
                [decoder.position for decoder in decoders],
                [decoder.buffer for decoder in decoders],
            )
        except Exception as error:
            if len(requests) == 1:
                requests[0].fail(error)
                return
            for request in requests:
                self._decode([request])
            return
        for decoder, request_logits in zip(decoders, logits, strict=True):
            decoder.take_logits(request_logits)

    def _heal(self, requests: list[_RunningRequest]) -> None:
        """Heal one of the answers that are held back, in turns, by a pass between two steps; the others wait for it."""
        healing = [
            (request, request.decoder)
            for request in requests
            if isinstance(request.decoder, ExactDecoder) and request.decoder.holds_back
        ]
        if not healing:
            return
        request, decoder = healing[self._turn % len(healing)]
        self._turn += 1
        try:
            decoder.heal(self._settings.rows)
        except Exception as error:
            request.fail(error)


AnswerRequest = Callable[[FusionEngine], tuple[Prompt, SamplingParams]]
"""Builds the prompt of a request and its sampling settings, once the engine is loaded."""

SETTINGS = SchedulerSettings(waiting=sys.maxsize)
"""A framework's callers wait in the queue: they do not handle refusals."""


class EngineHandle:
    """Answers any number of threads and event loops with one model, which is loaded on first use.

    Copies of a framework's object share the handle. After pickling, the object in the other process loads the model
    again by its own settings.

    Args:
        load: makes the engine; called once, by the first request.
        settings: of the scheduler.
        config: what the engine is loaded by, so that a later change is noticed.

    Attributes:
        wrapped: whether the engine was made by the caller, so that no other process can load it.
    """

    def __init__(
        self,
        load: Callable[[], FusionEngine],
        settings: SchedulerSettings = SETTINGS,
        *,
        config: EngineConfig | None = None,
    ) -> None:
        self._load, self._settings = load, settings
        self._engine: FusionEngine | None = None
        self.wrapped, self.config = False, config
        self._scheduler: Scheduler | None = None
        self._process = 0
        self._detach_finalizer: Callable[[], object] = lambda: None
        self._making = threading.Lock()

    @classmethod
    def wrap(
        cls, engine: FusionEngine, settings: SchedulerSettings = SETTINGS, *, config: EngineConfig | None = None
    ) -> EngineHandle:
        """Wrap an engine that exists; `close` leaves it open."""
        handle = cls(lambda: engine, settings, config=config)
        handle.wrapped = True
        return handle

    @classmethod
    def lazy(cls, config: EngineConfig) -> EngineHandle:
        """Return a handle that loads its engine on first use."""
        return cls(partial(FusionEngine.load, config), config=config)

    @property
    def engine(self) -> FusionEngine:
        """The engine; the model is loaded on first use."""
        with self._making:
            return self._loaded()

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler that answers requests; started on first use, and again after a fork."""
        with self._making:
            engine = self._loaded()
            if self._scheduler is None or self._process != os.getpid():  # a thread does not survive a fork
                self._scheduler, self._process = Scheduler(engine, self._settings), os.getpid()
                # The scheduler's thread must not keep the model when the last reference to this handle is gone.
                finalizer = weakref.finalize(self, self._scheduler.close, drain=False, wait=False)
                self._detach_finalizer = finalizer.detach
            return self._scheduler

    def _loaded(self) -> FusionEngine:
        self._engine = self._engine or self._load()  # the caller holds the lock
        return self._engine

    def for_config(self, config: EngineConfig) -> EngineHandle:
        """Return this handle if its engine is, or will be, loaded by this config; else a new one.

        Raises:
            MisplacedSetting: if the config changed and the engine exists already: the change would have no effect.
        """
        changed = [] if self.config is None else self.config.differences(config)
        if changed and (self.wrapped or self._engine is not None):
            raise MisplacedSetting(f"{', '.join(changed)} changed after the engine was loaded; create a new object")
        return EngineHandle.lazy(config) if changed else self

    def submit(self, request: AnswerRequest, *, method: Method | None = None) -> RequestHandle:
        """Queue a request like `Scheduler.submit`; the first one loads the model, which may fail."""
        return self.scheduler.submit(*request(self.engine), method=method)

    async def asubmit(self, request: AnswerRequest) -> RequestHandle:
        """Queue a request like `submit`, without blocking the event loop."""
        submitting = asyncio.ensure_future(asyncio.to_thread(self.submit, request))
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(cancel_request)  # the thread cannot be stopped before it has submitted
            raise

    def close(self) -> None:
        """Cancel the answers in progress and close the engine unless it was wrapped; a later request loads it anew."""
        with self._making:
            scheduler, self._scheduler = self._scheduler, None
            self._detach_finalizer()  # it would keep the model
            engine = None if self.wrapped else self._engine
            self._engine = self._engine if self.wrapped else None
        if scheduler is not None:
            scheduler.close(drain=False)
        if engine is not None:
            engine.close()

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __copy__(self) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the model: the owner in the other process says again how to load it, unless the engine is wrapped.
        return EngineHandle, (_no_engine,), {"wrapped": self.wrapped}


def _no_engine() -> FusionEngine:
    raise QCFuseError(
        "this object wraps an engine of another process; create it with model=... and store=..., so that each process "
        "loads its own engine"
    )


def cancel_request(submitted: asyncio.Future[RequestHandle] | Future[RequestHandle]) -> None:
    """Cancel a request whose caller has gone."""
    if not submitted.cancelled() and submitted.exception() is None:
        submitted.result().cancel()
