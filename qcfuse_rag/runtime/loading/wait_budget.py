"""A time budget for one request's waits on the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

T = TypeVar("T")

Tasks = SimpleQueue[tuple[Callable[[], Any], "Future[Any]"] | None]


class WaitBudget:
    """The seconds that one request may wait in total. With a limit, the store is called in a thread, until `close`.

    Args:
        limit_s: the budget in seconds; None sets no limit.

    Attributes:
        waited_s: seconds waited so far.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._tasks: Tasks | None = None
        self.waited_s = 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds left, at least 0; None if there is no limit."""
        return None if self._limit_s is None else max(0.0, self._limit_s - self.waited_s)

    @property
    def timeout_reason(self) -> str:
        """The reason of a miss that did not arrive within the budget."""
        return f"not there within {self._limit_s:g} s"

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside the context as waiting."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - began

    def call(self, ask: Callable[[], T]) -> T:
        """Call a function of the store that may hang.

        Raises:
            TimeoutError: if it does not return within the seconds left. The thread then stays in it, not waited for.
        """
        left_s, outcome = self.left_s, Future[T]()
        with self.waiting():
            if left_s is None:
                return ask()
            if self._tasks is None:
                self._tasks = SimpleQueue()
                threading.Thread(target=_work, args=(self._tasks,), name="qcfuse-lookup", daemon=True).start()
            self._tasks.put((ask, outcome))
            try:
                return outcome.result(left_s)
            except TimeoutError:
                if outcome.done():  # the call raised the error itself, or it has just ended
                    return outcome.result()
                raise TimeoutError(f"no answer within {left_s:g} s") from None

    def close(self) -> None:
        """End the thread."""
        if self._tasks is not None:
            self._tasks.put(None)


def call_with_timeout(limit_s: float | None, call: Callable[[], T]) -> T:
    """Call a function that may hang, at most so many seconds; see `WaitBudget.call`."""
    budget = WaitBudget(limit_s)
    try:
        return budget.call(call)
    finally:
        budget.close()


@torch.inference_mode()
def _work(tasks: Tasks) -> None:
    while (task := tasks.get()) is not None:
        call, outcome = task
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)
        del task, call, outcome  # keeps nothing alive that the next call waits for
