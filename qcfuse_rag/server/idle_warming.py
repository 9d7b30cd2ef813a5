"""While no request is answered, warm passages of earlier requests that the store did not have."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable

from qcfuse_rag.background_thread import BackgroundThread
from qcfuse_rag.engine.scheduler import EngineHandle
from qcfuse_rag.library.documents import ServedLibrary

LOG = logging.getLogger(__name__)

CLIENTS = "clients"
"""The source of passages that clients sent, by which they are forgotten."""

IDLE_S = 0.5
"""Seconds without a request after which the server counts as idle."""

LONGEST = 2048
"""Tokens of the longest passage that is kept; a passage is computed in one pass, beside which requests are slower."""


class IdleWarming:
    """Warms passages in a thread of its own, one at a time.

    Args:
        handle: the engine, and the scheduler whose requests come first.
        library: the library that the server retrieves from, or None. What it forgets is not warmed any more, and its
            own passages are warmed only while it has them: documents may have been replaced since the request.
        max_waiting: most passages that wait; the oldest of more are dropped.

    Attributes:
        warmed: number of passages warmed so far.
    """

    def __init__(self, handle: EngineHandle, library: ServedLibrary | None = None, *, max_waiting: int = 256) -> None:
        self._handle, self._library, self._max_waiting = handle, library, max_waiting
        self._waiting: OrderedDict[str, str] = OrderedDict()  # text -> source
        self._warming: str | None = None  # the source of the passage that is warmed now
        self._changed = threading.Condition()
        self._closed = False
        self.warmed = 0
        if library is not None:
            library.forget_listeners.append(self.forget)
        self._thread = BackgroundThread(self._run, name="qcfuse-keep", close=self.close)

    def add(self, passages: Iterable[tuple[str, str]]) -> None:
        """Add passages as pairs of text and source; returns at once."""
        with self._changed:
            for text, source in passages:
                self._waiting[text] = source
                self._waiting.move_to_end(text)
            while len(self._waiting) > self._max_waiting:
                self._waiting.popitem(last=False)
            self._changed.notify()

    def forget(self, source: str) -> int:
        """Drop the waiting passages of a source, and forget one that is warmed now when it is done.

        Returns:
            The number of these passages.
        """
        with self._changed:
            before = len(self._waiting) + (self._warming is not None)
            self._waiting = OrderedDict(pair for pair in self._waiting.items() if pair[1] != source)
            if self._warming == source:
                self._warming = None
            return before - len(self._waiting) - (self._warming is not None)

    def close(self) -> None:
        """Warm no further passage and end the thread; what waits is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting)
            if not self._wait_until_idle():
                return
            with self._changed:
                if not self._waiting:
                    continue  # forgotten meanwhile
                text, source = self._waiting.popitem()  # the newest
                self._warming = source
            try:
                self._warm(text, source)
                with self._changed:
                    forgotten, self._warming = self._warming is None, None
                if forgotten and (source == CLIENTS or self._was_removed(text, source)):
                    self._handle.engine.forget(source)
            except Exception as error:
                LOG.error("a passage of a request is not kept: %s", error)
                self._warming = None

    def _wait_until_idle(self) -> bool:
        """Wait until no request was there for a while; return False if the thread is to end."""
        scheduler, idle_since = self._handle.scheduler, time.monotonic()
        while not self._closed:
            if not scheduler.idle:
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since >= IDLE_S:
                return True
            with self._changed:
                self._changed.wait_for(lambda: self._closed, timeout=IDLE_S / 5)
        return False

    def _warm(self, text: str, source: str) -> None:
        engine = self._handle.engine
        if self._was_removed(text, source):
            return
        if len(text) > LONGEST * engine.prompts.tokens.longest_token or len(engine.prompts.chunk_ids(text)) > LONGEST:
            LOG.error("a passage of a request is not kept: it has more than %d tokens", LONGEST)
            return
        self.warmed += engine.warm([text], sources=[source], replace=False).warmed > 0

    def _was_removed(self, text: str, source: str) -> bool:
        """Return whether the passage is of a document of the library that has it no longer."""
        return self._library is not None and source != CLIENTS and not self._library.has(text, source)
