"""Many requests on one engine: prefilled one at a time, decoded together, in one thread.

Continuous batching (Yu et al., Orca, OSDI 2022): a request joins the answers in the making as soon as it is prefilled
and leaves when it ends, whatever the others do. Between two prefills there are some decode steps, and one between the
parts of a long prefill (Agrawal et al., Sarathi-Serve, OSDI 2024): new questions slow the answers that are being read
and do not stop them.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.engine.request import ScheduledAnswer
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
        waiting: most requests to keep waiting; one more is refused.
        steps: decode steps between two prefills while answers are in the making.
        rows: rows of a prefill to compute between two decode steps; methods that steer a pass between layers compute
            all.
        kv_bytes: most bytes of keys and values that active requests may hold together; None for no bound. A request
            that is larger by itself is answered alone.

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

    Requests are taken in the order they came. What a request costs others is time, nothing else: an error, a
    cancellation or a reader who stops reading ends that request alone.

    Args:
        engine: whose `prefill` is used; the scheduler does not close it.
        settings: how many at once.
    """

    def __init__(self, engine: FusionEngine, settings: SchedulerSettings | None = None) -> None:
        self._engine, self._settings = engine, settings or SchedulerSettings()
        self._waiting: deque[ScheduledAnswer] = deque()
        self._beginning: ScheduledAnswer | None = None
        self._active: list[ScheduledAnswer] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="qcfuse-scheduler", daemon=True)
        self._thread.start()

    def submit(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, method: Method | None = None
    ) -> ScheduledAnswer:
        """Queue a request; returns at once.

        Args:
            prompt: from the engine's `prompt`.
            sampling: how to choose tokens; greedy by default.
            method: instead of the engine's own.

        Raises:
            Busy: if as many requests are waiting as may.
            PromptTooLong: if prompt and answer exceed the context window.
            RuntimeError: if the scheduler is closed.
        """
        params = sampling or SamplingParams()
        check_window(self._engine.lm, prompt, params.max_new_tokens)
        answer = ScheduledAnswer(self._engine.lm, prompt, params, method)
        with self._changed:
            if self._closed:
                raise RuntimeError("the scheduler is closed")
            if len(self._waiting) >= self._settings.waiting:
                self._waiting = deque(one for one in self._waiting if not one.abandoned())
            if len(self._waiting) >= self._settings.waiting:
                raise Busy(f"{len(self._waiting)} requests are waiting already; ask again later")
            self._waiting.append(answer)
            self._changed.notify()
        return answer

    @property
    def waiting(self) -> int:
        """Requests that are not being answered yet."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """Whether it answers; its thread ends by `close` alone."""
        return self._thread.is_alive()

    @property
    def active(self) -> int:
        """Answers in the making."""
        return len(self._active)

    def close(self, *, drain: bool = True, wait: bool = True) -> None:
        """Take no more requests and end the thread.

        Args:
            drain: answer what was submitted; else whoever waits for it gets `Closed`.
            wait: until it has ended.
        """
        with self._changed:
            self._closed = True
            if not drain:
                beginning = () if self._beginning is None else (self._beginning,)
                for one in (*self._waiting, *beginning, *self._active):
                    one.interrupt(Closed("the engine was closed before the answer was whole"))
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
                self._beginning = None  # nothing of a request is held once it is over
            for _ in range(self._settings.steps):
                self._step()
                if not self._active:
                    break

    def _next(self) -> ScheduledAnswer | None:
        """Take the first request that waits, if there is room for it."""
        self._waiting = deque(one for one in self._waiting if not one.abandoned())
        if not self._waiting or len(self._active) >= self._settings.active:
            return None
        held = sum(one.tokens for one in self._active) + self._waiting[0].tokens
        limit = self._settings.kv_bytes
        if self._active and limit is not None and held * self._engine.lm.kv_bytes_per_token > limit:
            return None
        return self._waiting.popleft()

    def _begin(self, request: ScheduledAnswer) -> None:
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
            done = request.context.run(prefill)
        except Exception as error:
            request.fail(error)
        else:
            request.begin(done)
            self._active.append(request)

    def _step(self) -> None:
        """Choose the next token of every answer, and compute what follows it for those that go on."""
        going = [one for one in self._active if one.advance()]
        self._compute(going)
        self._active = [one for one in going if not one.over]

    def _compute(self, going: list[ScheduledAnswer]) -> None:
        """Compute what follows; where that fails for several, one by one, so that it ends only those it fails for."""
        if not going:
            return
        try:
            logits = self._engine.runner.decodes(
                [one.last for one in going],
                [one.position for one in going],
                [one.buffer for one in going],
            )
        except Exception as error:
            if len(going) == 1:
                going[0].fail(error)
                return
        else:
            for one, own in zip(going, logits, strict=True):
                one.follow(own)
            return
        for one in going:
            self._compute([one])
