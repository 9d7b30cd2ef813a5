"""While no request is answered, warm passages of earlier requests that the store did not have."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable

from qcfuse_rag.background_thread import BackgroundThread
from qcfuse_rag.engine.scheduler import EngineHandle
from qcfuse_rag.errors import StoreError
from qcfuse_rag.library.documents import ServedLibrary

LOG = logging.getLogger(__name__)

CLIENTS = "clients"
"""The source of passages that clients sent, by which they are forgotten."""

IDLE_S = 0.5
"""Seconds without a request after which the server counts as idle."""

MAX_WAITING = 256
"""Most passages that wait; the oldest of more are dropped."""

LONGEST = 2048
"""Tokens of the longest passage that is kept; a passage is computed in one pass, beside which requests are slower."""


class IdleWarming:
    """Warms passages in a thread of its own, one at a time.

    Args:
        handle: the engine, and the scheduler whose requests come first.
        library: the library that the server retrieves from, or None. What it forgets is not warmed any more, and its
            own passages are warmed only while it has them: documents may have been replaced since the request.
    """

    def __init__(self, handle: EngineHandle, library: ServedLibrary | None = None) -> None:
        self._handle, self._library = handle, library
        self._waiting: OrderedDict[str, tuple[str, int]] = OrderedDict()  # text -> source and generation
        self._changed = threading.Condition()
        self._closed = False
        self.warmed = 0  # passages so far
        if library is not None:
            library.forget_listeners.append(self.forget)
        self._thread = BackgroundThread(self._run, name="qcfuse-keep", close=self.close)

    def generation(self) -> int | None:
        """Return the number by which `add` knows what was forgotten since a request began; None if nothing is known."""
        try:
            return self._handle.engine.corpus.open_sources().generation()
        except StoreError:
            return None

    def add(self, passages: Iterable[tuple[str, str]], generation: int | None) -> None:
        """Add passages of a request as pairs of text and source; returns at once.

        They are dropped if any process forgets a document after their request has asked for the `generation`: they may
        be of that document.
        """
        if generation is None:
            return
        with self._changed:
            for text, source in passages:
                self._waiting[text] = source, generation
                self._waiting.move_to_end(text)
            while len(self._waiting) > MAX_WAITING:
                self._waiting.popitem(last=False)
            self._changed.notify()

    def forget(self, source: str) -> int:
        """Drop the waiting passages of a source; return their number, with one that is being warmed."""
        with self._changed:
            dropped = [text for text, (of, _) in self._waiting.items() if of == source]
            for text in dropped:
                del self._waiting[text]
            return len(dropped)

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
                text = next(reversed(self._waiting))
                source, generation = self._waiting[text]
            try:
                self._warm(text, source, generation)
            except Exception as error:
                LOG.error("a passage of a request is not kept: %s", error)
            with self._changed:
                if self._waiting.get(text) == (source, generation):  # not sent again after something was forgotten
                    del self._waiting[text]

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

    def _warm(self, text: str, source: str, generation: int) -> None:
        engine = self._handle.engine
        if self._library is not None and source != CLIENTS and not self._library.has(text, source):
            return  # of a document of the library that has it no longer
        if len(text) > LONGEST * engine.prompts.tokens.longest_token or len(engine.prompts.chunk_ids(text)) > LONGEST:
            LOG.error("a passage of a request is not kept: it has more than %d tokens", LONGEST)
            return
        self.warmed += engine.warm([text], sources=[source], replace=False, generation=generation).warmed > 0
