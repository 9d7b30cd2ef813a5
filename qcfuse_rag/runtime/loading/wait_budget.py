"""How long a request may still wait for its store."""

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
    """Seconds that one request may wait, in all.

    Args:
        limit_s: how many; None waits as long as it takes.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self.waited_s = 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, 0 if none; None if there is no limit."""
        return None if self._limit_s is None else max(0.0, self._limit_s - self.waited_s)

    @property
    def exhausted(self) -> str:
        """What to say of what did not come."""
        return f"not there within {self._limit_s:g} s"

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time that something takes."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - began

    def call(self, ask: Callable[[], T]) -> T:
        """Ask a store something; see `call_with_timeout`.

        Raises:
            TimeoutError: if it has not answered by then.
        """
        with self.waiting():
            return call_with_timeout(self.left_s, ask)


def call_with_timeout(limit_s: float | None, call: Callable[[], T]) -> T:
    """Call something that may hang, in a thread of its own.

    Raises:
        TimeoutError: if it has not returned by then; its thread is left to itself.
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
        if outcome.done():  # the call's own
            raise
        raise TimeoutError(f"no answer within {limit_s:g} s") from None
