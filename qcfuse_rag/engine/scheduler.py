"""A scheduler of many requests on one engine: prefills in parts, decodes together, in one thread.

Continuous batching (Yu et al., Orca, OSDI 2022): a request joins the running batch as soon as it is prefilled and
leaves when it ends. Between two prefills, and between two parts of a long one (Agrawal et al., Sarathi-Serve, OSDI
2024), there are some decode steps, so new questions slow the running answers without stopping them. While a short
question waits for its first token there is one step after every other part: a burst of questions is prefilled soon,
and steps of more answers together take less time for each.

A part takes some tenths of a second. The next part is that of the request with the fewest rows left (shortest remaining
processing time, Schrage 1968), so a short question overtakes a long prompt; requests that need one part are equal and
go in the order of submission. Every few parts, one is the oldest request's, so nobody waits for ever. Between two
parts, requests whose readers have gone end.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from qcfuse_rag.background_thread import BackgroundThread
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.engine.request import RequestHandle, RunningRequest
from qcfuse_rag.errors import Busy, Closed
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import check_window
from qcfuse_rag.generation.decoding import HealingDecoder
from qcfuse_rag.generation.sampling_params import SamplingParams
from qcfuse_rag.prompts.segments import Prompt

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

    active: int = 16
    waiting: int = 64
    steps: int = 2
    rows: int = 512
    part_s: float = 0.25
    overtaken: int = 4
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("active", "waiting", "steps", "rows", "overtaken"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.part_s <= 0:
            raise ValueError(f"part_s must be above 0, got {self.part_s}")


class Scheduler:
    """Answers requests from any number of threads and event loops.

    Requests of equal length, and short ones, are taken in the order of submission. An error, a cancellation or a
    reader that stops reading ends that request alone.

    Args:
        engine: prefills and decodes; the scheduler does not close it.
        settings: how many at once.
    """

    def __init__(self, engine: FusionEngine, settings: SchedulerSettings | None = None) -> None:
        self._engine, self._settings = engine, settings or SchedulerSettings()
        self._queue: list[RunningRequest] = []  # those that are not prefilled yet, in the order of submission
        self._parts, self._first_part_rows = 0, max(1, self._settings.rows // 2)
        self._active: list[RunningRequest] = []
        self._changed = threading.Condition()
        self._closed = False
        self._turn, self._saved_s = 0, 0.0
        close = partial(self.close, drain=False)
        self._thread = BackgroundThread(self._run, name="qcfuse-scheduler", close=close)

    def submit(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, method: Method | None = None
    ) -> RequestHandle:
        """Queue a request; returns at once.

        Args:
            prompt: from the engine's `prompt`.
            sampling: how to choose tokens; greedy by default.
            method: instead of the engine's own.

        Raises:
            Busy: if the queue is full.
            PromptTooLong: if prompt and answer exceed the context window.
            Closed: if the engine is closed.
        """
        params = sampling or SamplingParams()
        check_window(self._engine.lm, prompt, params.max_new_tokens)
        request = RunningRequest(self._engine.lm, prompt, params, method)
        request.rows_left = self._engine.predict_rows(prompt, method)
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
        """Take no more requests and end the thread.

        Args:
            drain: answer the submitted requests first; else their readers get `Closed`.
            wait: return when the thread has ended.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def _next(self) -> RunningRequest | None:
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

    def _has_room(self, request: RunningRequest) -> bool:
        """Return whether the limits allow to begin a request."""
        begun = [*self._active, *(queued for queued in self._queue if queued.begun)]
        if not begun or self._settings.kv_bytes is None:
            return len(begun) < self._settings.active
        tokens = sum(other.tokens for other in begun) + request.tokens
        kv_bytes = tokens * self._engine.lm.kv_bytes_per_token
        return len(begun) < self._settings.active and kv_bytes <= self._settings.kv_bytes

    def _short_waits(self) -> bool:
        """Return whether a request that needs one part could begin."""
        with self._changed:
            return any(
                not request.begun and request.rows_left <= self._first_part_rows and self._has_room(request)
                for request in self._queue
            )

    def _begin(self, request: RunningRequest) -> None:
        """Prepare the prefill of a request; nothing is computed yet."""
        request.part_rows = self._first_part_rows
        request.begin(
            self._engine.prefill_in_parts(
                request.prompt,
                method=request.method,
                answer_tokens=request.params.max_new_tokens,
                part_rows=lambda: self._part_rows(request),
                prefixes=self._engine.prefixes,
            )
        )

    def _part_rows(self, request: RunningRequest) -> int:
        """Return the most rows of a request's next part."""
        if self._active:
            return min(request.part_rows, self._settings.rows)
        is_timed = request.parts > 1
        return max(request.part_rows, MIN_LONE_PART_ROWS) if is_timed else request.part_rows

    def _compute_part(self, request: RunningRequest) -> None:
        """Compute a part of a request's prefill, or all of a short one."""
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
        """Choose the next token of every answer, and compute what comes next for those that continue."""
        continuing = [request for request in self._active if request.advance()]
        if len(continuing) == 1:
            self._compute(continuing[0])  # heals in the pass of its step
        elif continuing:
            self._heal(continuing)
            self._decode([request for request in continuing if not request.finished and request.decoder.needs_step])
        self._active = [request for request in continuing if not request.finished]

    def _decode(self, requests: list[RunningRequest]) -> None:
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

    def _compute(self, request: RunningRequest) -> None:
        """Compute the next pass of one request; an error ends the request."""
        try:
            request.decoder.compute()
        except Exception as error:
            request.fail(error)

    def _heal(self, requests: list[RunningRequest]) -> None:
        """Heal one of several requests, in turns, by a pass between two steps.

        Answers that are held back come first; their passes make the others wait, as a prefill does. Another answer is
        healed once the time of its pass has been saved up from the share by which steps may be slower.
        """
        healing = [
            (request, request.decoder)
            for request in requests
            if isinstance(request.decoder, HealingDecoder) and request.decoder.needs_healing
        ]
        if not healing:
            return
        healing = [pair for pair in healing if pair[1].holds_back] or healing
        request, decoder = healing[self._turn % len(healing)]
        try:
            rows = self._settings.rows if decoder.holds_back else self._affordable_rows(request)
            if rows:
                self._turn += 1
                decoder.heal(rows)
        except Exception as error:
            request.fail(error)

    def _affordable_rows(self, request: RunningRequest) -> int:
        """Save up the time by which this step may be slower; return the rows of a pass if that pays for one, else 0.

        The pass has so many rows that they take about as long as reading the weights for them.
        """
        costs = self._engine.runner.step_costs()
        rows = min(self._settings.rows, costs.rows_like_a_step)
        self._saved_s = min(self._saved_s + request.params.slowdown * costs.step_s, costs.pass_s(rows))
        if self._saved_s < costs.pass_s(rows):
            return 0
        self._saved_s = 0.0
        return rows
