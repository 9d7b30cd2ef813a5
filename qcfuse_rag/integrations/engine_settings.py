"""Settings with which frameworks' model classes load an engine, and that engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import Field, create_model

from qcfuse_rag.declared_options import pydantic_fields
from qcfuse_rag.engine.config import LOAD_SETTINGS, EngineConfig
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.engine.scheduler import EngineHandle, RequestHandle
from qcfuse_rag.errors import MisplacedSetting
from qcfuse_rag.generation.response_format import ResponseFormat, ResponseReader
from qcfuse_rag.generation.sampling_params import SAMPLING_SETTINGS, SamplingParams

DeclaredSettings: Any = create_model(
    "DeclaredSettings",
    **pydantic_fields(EngineConfig, LOAD_SETTINGS),
    **pydantic_fields(SamplingParams, SAMPLING_SETTINGS),
)


def response_format_of(call: Mapping[str, Any]) -> ResponseFormat:
    """Return the response format that the keyword arguments of a call ask for."""
    several_calls = call.get("parallel_tool_calls") is not False
    return ResponseFormat(call.get("tools") or (), call.get("tool_choice"), call.get("response_format"), several_calls)


class EngineSettings(DeclaredSettings):  # type: ignore[misc] # a class that pydantic makes has no type
    """A pydantic mixin for a framework's model class: the fields and the engine that all such classes share.

    The subclass adds its model's name, which it takes as the argument `model`, and an attribute for the engine's
    handle. The engine is loaded on first use.
    """

    MODEL: ClassVar[str] = "model"  # name of the field with the model's name
    HANDLE: ClassVar[str] = "_handle"  # of the attribute with the handle; of a field where copies have only fields

    logprobs: bool | None = Field(
        default=None, description="Whether answers come with the log probabilities of their tokens."
    )
    top_logprobs: int | None = Field(default=None, description="And with those of so many likeliest tokens.", ge=0)

    def model_post_init(self, context: Any) -> None:
        """Prepare to load the model on first use."""
        super().model_post_init(context)
        if getattr(self, self.HANDLE) is None:
            setattr(self, self.HANDLE, EngineHandle.lazy(self._config()))

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Load the model by name in the process that unpickles.

        The engine of `from_engine` is not pickled, so its handle raises when it is used.
        """
        attributes = {**state["__dict__"], **(state["__pydantic_private__"] or {})}
        pickled: EngineHandle | None = attributes.get(self.HANDLE)
        super().__setstate__(state)
        is_wrapped = pickled is not None and pickled.wrapped
        setattr(self, self.HANDLE, pickled if is_wrapped else EngineHandle.lazy(self._config()))

    @classmethod
    def from_engine(cls, engine: FusionEngine, **options: Any) -> Self:
        """Wrap an engine that is already loaded; its method and prompt template are used.

        Closing the object leaves the engine open.

        Raises:
            MisplacedSetting: if an option is a setting that loads engines, such as `method`.
        """
        misplaced = [name for name in ("model", "model_name", *LOAD_SETTINGS) if options.get(name) is not None]
        if misplaced:
            raise MisplacedSetting(f"a given engine keeps its settings; set {', '.join(misplaced)} when you load it")
        instance = cls(**{"model": engine.lm.name, **options})
        setattr(instance, cls.HANDLE, EngineHandle.wrap(engine, config=instance._config()))
        return instance

    @property
    def engine(self) -> FusionEngine:
        """The engine; the model is loaded on first use."""
        return self._current_handle().engine

    def close(self) -> None:
        """Cancel running requests and free the model, unless it came from `from_engine`."""
        handle: EngineHandle = getattr(self, self.HANDLE)
        handle.close()

    def sampling_params(
        self, call: Mapping[str, Any], *, max_new_tokens: int, stop: str | Sequence[str]
    ) -> SamplingParams:
        """Return the settings of an answer; a setting that is missing in the call, or None, is the field's.

        Raises:
            ValueError: if a setting is invalid.
        """
        settings = {name: getattr(self, name) if call.get(name) is None else call[name] for name in SAMPLING_SETTINGS}
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            logprobs=self.top_count(call),
            **settings,
        )

    def top_count(self, call: Mapping[str, Any]) -> int | None:
        """Return `SamplingParams.logprobs` for a call, whose settings go before the fields of the same names.

        Raises:
            ValueError: if there is a number of likeliest tokens, and log probabilities are not asked for.
        """
        wanted, count = call.get("logprobs"), call.get("top_logprobs")
        if self.logprobs if wanted is None else wanted:
            return (self.top_logprobs if count is None else count) or 0
        if count or (wanted is None and self.top_logprobs):
            raise ValueError("top_logprobs needs logprobs=True")
        return None

    def _reader(self, answer: RequestHandle, call: Mapping[str, Any]) -> ResponseReader:
        return ResponseReader(self.engine.lm.tokenizer, response_format_of(call), answer.prompt)

    def _config(self) -> EngineConfig:
        return EngineConfig(model=getattr(self, self.MODEL), **{name: getattr(self, name) for name in LOAD_SETTINGS})

    def _current_handle(self) -> EngineHandle:
        """Return the handle, or a new one if settings were changed before the engine was loaded.

        A setting that was changed after the engine was loaded, in this object or in a copy, is a MisplacedSetting.
        """
        handle: EngineHandle = getattr(self, self.HANDLE)
        handle = handle.for_config(self._config())
        setattr(self, self.HANDLE, handle)
        return handle
