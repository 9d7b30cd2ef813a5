"""A time budget for one request's waits on the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


class WaitBudget:
    """The seconds that one request may wait in total.

    Args:
        limit_s: the budget in seconds; None sets no limit.

    Attributes:
        waited_s: seconds waited so far.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
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
        """Call a function of the store, within the budget; see `call_with_timeout`.

        Raises:
            TimeoutError: if it does not return within the seconds left.
        """
        with self.waiting():
            return call_with_timeout(self.left_s, ask)


def call_with_timeout(limit_s: float | None, call: Callable[[], T]) -> T:
    """Call a function that may hang, in a separate thread if there is a limit.

    Args:
        limit_s: most seconds to wait; None sets no limit.
        call: the function.

    Raises:
        TimeoutError: if it does not return in time; its thread keeps running and is not waited for.
    """
    if limit_s is None:
        return call()
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            with torch.inference_mode():
                outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="qcfuse-lookup", daemon=True).start()
    try:
        return outcome.result(limit_s)
    except TimeoutError:
        if outcome.done():  # the call raised the error itself, or it has just ended
            return outcome.result()
        raise TimeoutError(f"no answer within {limit_s:g} s") from None
