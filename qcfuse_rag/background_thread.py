"""A daemon thread that ends before the interpreter does."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable


class BackgroundThread(threading.Thread):
    """Runs until its owner is closed, and closes its owner when the program ends without having done so.

    Python stops daemon threads wherever they are when it finalizes. Inside an operation of torch this aborts the whole
    process, after the program has done its work. Python waits for other threads before the functions of `atexit` run,
    so a thread that is not a daemon would never be told to end.

    Args:
        run: what the thread does; it starts at once.
        name: of the thread.
        close: tells `run` to end, and waits until it has.
    """

    def __init__(self, run: Callable[[], object], *, name: str, close: Callable[[], object]) -> None:
        super().__init__(target=self._run_to_end, args=(run,), name=name, daemon=True)
        self._close = close
        atexit.register(self._at_exit)
        self.start()

    def _run_to_end(self, run: Callable[[], object]) -> None:
        try:
            run()
        finally:  # keep the owner alive no longer
            atexit.unregister(self._at_exit)
            self._close = lambda: None

    def _at_exit(self) -> None:
        if self.is_alive():  # it is not in a forked process
            self._close()
