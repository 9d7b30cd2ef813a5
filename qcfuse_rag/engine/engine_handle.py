"""An engine behind a scheduler, loaded when it is first needed: what the objects of a framework hold on to."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.engine.request import ScheduledAnswer
from qcfuse_rag.engine.scheduler import Scheduler, SchedulerSettings
from qcfuse_rag.errors import MisplacedSetting, QCFuseError
from qcfuse_rag.generation.sampling import SamplingParams
from qcfuse_rag.methods import choose_method
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.prompts.template import PromptTemplate

AnswerRequest = Callable[[FusionEngine], tuple[Prompt, SamplingParams]]
"""What to ask, once the engine is there to build it."""

SETTINGS = SchedulerSettings(waiting=sys.maxsize)
"""A framework's caller waits in line rather than handle a refusal."""

ENGINE_SETTINGS = ("model", "model_name", "store", "method", "ratio", "base", "rag_messages", "device", "dtype")
"""What frameworks' objects load an engine by."""


class ServedEngine:
    """Answers any number of threads and event loops with one model.

    Args:
        load: makes the engine; called once, by whoever comes first.
        settings: of the scheduler.

        loaded_by: what the engine is loaded by, for whoever holds this to see whether that is still so.

    Attributes:
        given: whether the engine was there before, so that no other process can load it.
        loaded_by: see the arguments.
    """

    def __init__(
        self,
        load: Callable[[], FusionEngine],
        settings: SchedulerSettings = SETTINGS,
        *,
        loaded_by: Mapping[str, object] | None = None,
    ) -> None:
        self._load, self._settings = load, settings
        self._engine: FusionEngine | None = None
        self.given, self.loaded_by = False, loaded_by or {}
        self._scheduler: Scheduler | None = None
        self._process = 0
        self._let_go: Callable[[], object] = lambda: None
        self._making = threading.Lock()

    @classmethod
    def of(
        cls,
        engine: FusionEngine,
        settings: SchedulerSettings = SETTINGS,
        *,
        options: Mapping[str, object] | None = None,
    ) -> ServedEngine:
        """Serve an engine that is there already; closing this leaves it open.

        Args:
            engine: the engine.
            settings: of the scheduler.
            options: what else the caller was given.

        Raises:
            MisplacedSetting: if one of them is what an engine is loaded by: it would have no effect.
        """
        late = [name for name in ENGINE_SETTINGS if (options or {}).get(name) is not None]
        if late:
            raise MisplacedSetting(f"an engine that is given stays as it is; say {', '.join(late)} where it is made")
        served = cls(lambda: engine, settings)
        served.given = True
        return served

    @classmethod
    def loading(cls, settings: Mapping[str, Any]) -> ServedEngine:
        """Serve an engine that is loaded by these settings when it is first needed, see `load_engine`."""
        return cls(partial(load_engine, **settings), loaded_by=settings)

    @property
    def engine(self) -> FusionEngine:
        """The engine; the model is loaded on first use."""
        with self._making:
            self._engine = self._engine or self._load()
            return self._engine

    @property
    def scheduler(self) -> Scheduler:
        """What answers requests."""
        engine = self.engine
        with self._making:
            if self._scheduler is None or self._process != os.getpid():  # a thread is not there after a fork
                self._scheduler, self._process = Scheduler(engine, self._settings), os.getpid()
                # Whoever lets go of this lets go of the model: the scheduler's thread must not keep it.
                self._let_go = weakref.finalize(self, self._scheduler.close, drain=False, wait=False).detach
            return self._scheduler

    def fitting(self, settings: Mapping[str, Any]) -> ServedEngine:
        """Return this if its engine is, or will be, what these settings ask for, else another one.

        Raises:
            MisplacedSetting: if it is not and is there already: the change would have no effect.
        """
        changed = [name for name, value in settings.items() if value != self.loaded_by.get(name, value)]
        if changed and (self.given or self._engine is not None):
            raise MisplacedSetting(
                f"{', '.join(changed)} changed after the engine was there, which stays as it is; make another one"
            )
        return ServedEngine.loading(settings) if changed else self

    def ask(self, request: AnswerRequest) -> ScheduledAnswer:
        """Queue a question; returns at once, but for loading the model the first time.

        Args:
            request: makes the prompt, and says how to choose tokens.

        Raises:
            QCFuseError: whatever loading the model raises, and see `Scheduler.submit`.
        """
        return self.scheduler.submit(*request(self.engine))

    async def ask_aside(self, request: AnswerRequest) -> ScheduledAnswer:
        """Queue a question like `ask`, without keeping the event loop from anything else."""
        asking = asyncio.ensure_future(asyncio.to_thread(self.ask, request))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(cancel_answer)  # the thread cannot be stopped before it has submitted
            raise

    def __deepcopy__(self, memo: object) -> Self:
        """Return itself: copies of a framework's object share the model."""
        return self

    def __copy__(self) -> Self:
        """Return itself, as `__deepcopy__`."""
        return self

    def __reduce__(self) -> tuple[Callable[[bool], ServedEngine], tuple[bool]]:
        """Leave the model behind: in another process, whoever held this says again how to load it.

        An engine that was given is in no other process, so what arrives there has none and says so when it is asked.
        """
        return _without_engine, (self.given,)

    def close(self) -> None:
        """Cancel what is being answered and, unless it was given, close the engine; it is loaded anew when needed."""
        with self._making:
            scheduler, self._scheduler = self._scheduler, None
            self._let_go()  # which would keep the model
            engine = None if self.given else self._engine
            self._engine = self._engine if self.given else None
        if scheduler is not None:
            scheduler.close(drain=False)
        if engine is not None:
            engine.close()


def load_engine(
    *,
    model: str,
    store: str | None,
    method: str | None,
    ratio: float | None,
    base: str | None,
    rag_messages: Sequence[tuple[str, str]] | None,
    device: str | None,
    dtype: str | None,
) -> FusionEngine:
    """Load an engine by the settings that frameworks' objects have; see `FusionEngine.load` and `choose_method`.

    Args:
        model: Hugging Face id, local folder or GGUF file.
        store: folder; None keeps passages in memory.
        method: what to reuse and recompute; None is the library's default.
        ratio: share of reused tokens to recompute; None is the method's own.
        base: how passages are stored; None is as the method reads.
        rag_messages: wording of the prompt; None is the library's.
        device: such as `cpu`; None is a GPU if there is one.
        dtype: such as `bfloat16`.
    """
    return FusionEngine.load(
        model,
        store=store,
        template=PromptTemplate(messages=tuple(rag_messages)) if rag_messages else None,
        method=choose_method(method, ratio=ratio, base=base),
        device=device,
        dtype=dtype,
    )


def _without_engine(given: bool) -> ServedEngine:
    served = ServedEngine(_absent)
    served.given = given
    return served


def _absent() -> FusionEngine:
    raise QCFuseError(
        "this was made of an engine, which stayed in the process that pickled it; make it of model=... and store=..., "
        "which every process opens for itself"
    )


def cancel_answer(asked: asyncio.Future[ScheduledAnswer] | Future[ScheduledAnswer]) -> None:
    """Cancel a request whose asker has gone."""
    if not asked.cancelled() and asked.exception() is None:
        asked.result().cancel()
