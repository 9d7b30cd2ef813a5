"""A scheduler of many requests on one engine: prefills one at a time, decodes together, in one thread.

Continuous batching (Yu et al., Orca, OSDI 2022): a request joins the running batch as soon as it is prefilled and
leaves when it ends. Between two prefills there are some decode steps, and one between the parts of a long prefill
(Agrawal et al., Sarathi-Serve, OSDI 2024), so new questions slow the running answers without stopping them.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.engine.request import RequestHandle
from qcfuse_rag.errors import Busy, Closed
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import check_window
from qcfuse_rag.fusion.recompute import Pause
from qcfuse_rag.generation.sampling import SamplingParams
from qcfuse_rag.prompts.segments import Prompt


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """How many requests at once.

    Attributes:
        active: most answers to decode together.
        waiting: most requests in the queue; further ones are refused.
        steps: decode steps between two prefills while answers are running.
        rows: rows of a prefill, or of healing, to compute between two decode steps; methods with a layer hook compute
            all rows of a prefill at once.
        kv_bytes: most bytes of keys and values of active requests together; None for no bound. A request that is
            larger by itself is answered alone.

    Raises:
        ValueError: if a number is too small.
    """

    active: int = 8
    waiting: int = 64
    steps: int = 4
    rows: int = 512
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("active", "waiting", "steps", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class Scheduler:
    """Answers requests from any number of threads and event loops.

    Requests are taken in the order of submission. An error, a cancellation or a reader that stops reading ends that
    request alone.

    Args:
        engine: prefills and decodes; the scheduler does not close it.
        settings: how many at once.
    """

    def __init__(self, engine: FusionEngine, settings: SchedulerSettings | None = None) -> None:
        self._engine, self._settings = engine, settings or SchedulerSettings()
        self._waiting: deque[RequestHandle] = deque()
        self._beginning: RequestHandle | None = None
        self._active: list[RequestHandle] = []
        self._changed = threading.Condition()
        self._closed = False
        self._turn, self._saved_s = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="qcfuse-scheduler", daemon=True)
        self._thread.start()

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
            RuntimeError: if the scheduler is closed.
        """
        params = sampling or SamplingParams()
        check_window(self._engine.lm, prompt, params.max_new_tokens)
        request = RequestHandle(self._engine.lm, prompt, params, method)
        with self._changed:
            if self._closed:
                raise RuntimeError("the scheduler is closed")
            if len(self._waiting) >= self._settings.waiting:
                self._waiting = deque(request for request in self._waiting if not request.end_if_cancelled())
            if len(self._waiting) >= self._settings.waiting:
                raise Busy(f"{len(self._waiting)} requests are waiting already; ask again later")
            self._waiting.append(request)
            self._changed.notify()
        return request

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """Whether the thread runs; only `close` ends it."""
        return self._thread.is_alive()

    @property
    def active(self) -> int:
        """Number of running answers."""
        return len(self._active)

    def close(self, *, drain: bool = True, wait: bool = True) -> None:
        """Take no more requests and end the thread.

        Args:
            drain: answer the submitted requests first; else their readers get `Closed`.
            wait: return when the thread has ended.
        """
        with self._changed:
            self._closed = True
            if not drain:
                beginning = () if self._beginning is None else (self._beginning,)
                for request in (*self._waiting, *beginning, *self._active):
                    request.interrupt(Closed("the engine was closed before the answer was whole"))
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
                while not self._waiting and not self._active:
                    if self._closed:
                        return
                    self._changed.wait()
                self._beginning = self._next()
            if self._beginning is not None:
                self._begin(self._beginning)
                self._beginning = None  # keep no reference to a finished request
            for _ in range(self._settings.steps):
                self._step()
                if not self._active:
                    break

    def _next(self) -> RequestHandle | None:
        """Take the first queued request, if the limits allow it."""
        self._waiting = deque(request for request in self._waiting if not request.end_if_cancelled())
        if not self._waiting or len(self._active) >= self._settings.active:
            return None
        tokens = sum(request.tokens for request in self._active) + self._waiting[0].tokens
        limit = self._settings.kv_bytes
        if self._active and limit is not None and tokens * self._engine.lm.kv_bytes_per_token > limit:
            return None
        return self._waiting.popleft()

    def _begin(self, request: RequestHandle) -> None:
        pause = Pause(self._settings.rows, self._step) if self._active else None
        answer_tokens = request.params.max_new_tokens
        try:
            prefill = partial(
                self._engine.prefill,
                request.prompt,
                method=request.method,
                answer_tokens=answer_tokens,
                pause=pause,
            )
            request.start(self._engine.runner, request.context.run(prefill))
        except Exception as error:
            request.fail(error)
        else:
            self._active.append(request)

    def _step(self) -> None:
        """Choose the next token of every answer, and compute what comes next for those that continue."""
        continuing = [request for request in self._active if request.advance()]
        if len(continuing) == 1:
            self._compute(continuing[0])  # heals in the pass of its step
        elif continuing:
            self._heal(continuing)
            self._decode([request for request in continuing if not request.finished and request.decoder.steps])
        self._active = [request for request in continuing if not request.finished]

    def _decode(self, requests: list[RequestHandle]) -> None:
        """Compute a step together; if that fails, compute the steps one by one to find the failing request."""
        if not requests:
            return
        decoders = [request.decoder for request in requests]
        try:
            logits = self._engine.runner.decodes(
                [decoder.answer.ids[-1] for decoder in decoders],
                [decoder.position for decoder in decoders],
                [decoder.buffer for decoder in decoders],
            )
        except Exception as error:
            if len(requests) == 1:
                requests[0].fail(error)
                return
        else:
            for decoder, request_logits in zip(decoders, logits, strict=True):
                decoder.take_logits(request_logits)
            return
        for request in requests:
            self._decode([request])

    def _compute(self, request: RequestHandle) -> None:
        """Compute the next pass of one request; an error ends the request."""
        try:
            request.decoder.compute()
        except Exception as error:
            request.fail(error)

    def _heal(self, requests: list[RequestHandle]) -> None:
        """Heal one of several requests, in turns, by a pass between two steps.

        An answer that is held back is healed like a prefill, which also makes the others wait, and before the rest.
        The rest is healed when the time that its pass takes has been saved up from the share by which steps may be
        slower.
        """
        healing = [request for request in requests if request.decoder.heals]
        if not healing:
            return
        healing = [request for request in healing if request.decoder.holds_back] or healing
        request = healing[self._turn % len(healing)]
        try:
            rows = self._settings.rows if request.decoder.holds_back else self._affordable_rows(request)
            if rows:
                self._turn += 1
                request.decoder.heal(rows)
        except Exception as error:
            request.fail(error)

    def _affordable_rows(self, request: RequestHandle) -> int:
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
