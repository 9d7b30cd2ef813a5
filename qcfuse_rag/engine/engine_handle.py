"""A handle to an engine behind a scheduler; frameworks' objects hold one, and the model is loaded on first use."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Self

from qcfuse_rag.engine.config import EngineConfig
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.engine.request import RequestHandle
from qcfuse_rag.engine.scheduler import Scheduler, SchedulerSettings
from qcfuse_rag.errors import MisplacedSetting, QCFuseError
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.generation.sampling_params import SamplingParams
from qcfuse_rag.prompts.segments import Prompt

AnswerRequest = Callable[[FusionEngine], tuple[Prompt, SamplingParams]]
"""Builds the prompt of a request and its sampling settings, once the engine is loaded."""

SETTINGS = SchedulerSettings(waiting=sys.maxsize)
"""A framework's callers wait in the queue: they do not handle refusals."""


class EngineHandle:
    """Answers any number of threads and event loops with one model.

    Copies of a framework's object share the handle. After pickling, the object in the other process loads the model
    again by its own settings.

    Args:
        load: makes the engine; called once, by the first request.
        settings: of the scheduler.
        config: what the engine is loaded by, so that a later change is noticed.

    Attributes:
        wrapped: whether the engine was made by the caller, so that no other process can load it.
        config: see the arguments.
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
        """Return the engine, loaded if it is not yet; the caller holds the lock."""
        self._engine = self._engine or self._load()
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
        """Queue a request; returns at once, except for the first one, which loads the model.

        Args:
            request: builds the prompt and the sampling settings.
            method: instead of the engine's own.

        Raises:
            QCFuseError: if loading the model fails; see also `Scheduler.submit`.
        """
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
        """Return itself: copies of a framework's object share the model."""
        return self

    def __copy__(self) -> Self:
        """Return itself, as `__deepcopy__`."""
        return self

    def __reduce__(self) -> tuple[Callable[[bool], EngineHandle], tuple[bool]]:
        """Pickle without the model: the owner in the other process says again how to load it.

        A wrapped engine exists in its own process only, so the handle in the other process raises an error on use.
        """
        return _without_engine, (self.wrapped,)


def _without_engine(wrapped: bool) -> EngineHandle:
    handle = EngineHandle(_no_engine)
    handle.wrapped = wrapped
    return handle


def _no_engine() -> FusionEngine:
    raise QCFuseError(
        "this object wraps an engine of another process; create it with model=... and store=..., so that each process "
        "loads its own engine"
    )


def cancel_request(submitted: asyncio.Future[RequestHandle] | Future[RequestHandle]) -> None:
    """Cancel a request whose caller has gone."""
    if not submitted.cancelled() and submitted.exception() is None:
        submitted.result().cancel()
