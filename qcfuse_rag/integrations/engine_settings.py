"""Settings with which frameworks' model classes load an engine, and that engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import BaseModel, Field

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.engine.engine_handle import LOAD_SETTINGS, EngineHandle
from qcfuse_rag.generation.sampling import Fidelity, SamplingParams
from qcfuse_rag.models.weights.formats import WeightFormat

SAMPLING_SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "fidelity",
)
"""Fields that have the names that `SamplingParams` has for them."""


class EngineSettings(BaseModel):
    """A pydantic mixin for a framework's model class: the fields and the engine that all such classes share.

    The subclass adds its model's name, which it takes as the argument `model`, and an attribute for the engine's
    handle. The engine is loaded on first use.

    Attributes:
        MODEL: name of the field with the model's name.
        HANDLE: name of the attribute with the handle; a private one, or a field where the framework makes copies of
            fields alone.
    """

    MODEL: ClassVar[str] = "model"
    HANDLE: ClassVar[str] = "_handle"

    store: str | None = Field(default=None, description="Folder of stored passages; None keeps them in memory only.")
    method: str | None = Field(default=None, description="What to reuse and recompute; None: the library's default.")
    ratio: float | None = Field(
        default=None, description="Share of reused tokens to recompute; None: the method's own."
    )
    base: str | None = Field(default=None, description="How passages are stored; None: as the method reads.")
    rag_messages: list[tuple[str, str]] | None = Field(
        default=None, description="Messages of the RAG prompt as (role, text), with {context} and {question} once each."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None,
        description="Variables of the model's chat template, such as {'enable_thinking': False}; calls may override.",
    )
    temperature: float = Field(default=0.0, description="0 is greedy.", ge=0)
    top_p: float = Field(default=1.0, description="Keep the likeliest tokens of this total probability.", gt=0, le=1)
    top_k: int = Field(default=0, description="Keep so many likeliest tokens; 0 keeps all.", ge=0)
    min_p: float = Field(default=0.0, description="Keep tokens with this share of the best probability.", ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, description="Above 1: tokens of prompt and answer less often.", gt=0)
    presence_penalty: float = Field(default=0.0, description="Subtracted from the logits of the answer's tokens.")
    frequency_penalty: float = Field(default=0.0, description="Subtracted once for each time the answer has a token.")
    seed: int | None = Field(default=None, description="Makes sampling repeatable; None draws anew each time.")
    fidelity: Fidelity = Field(
        default="fast",
        description="fast: decode over reused caches; heal: recompute the rest meanwhile; exact: as full prefill.",
    )
    logprobs: bool | None = Field(
        default=None, description="Whether answers come with the log probabilities of their tokens."
    )
    top_logprobs: int | None = Field(default=None, description="And with those of so many likeliest tokens.", ge=0)
    device: str | None = Field(default=None, description="Such as cpu or cuda:0; a GPU if there is one.")
    dtype: str | None = Field(
        default=None, description="Such as bfloat16; None: the faster of float32 and bfloat16 on a CPU."
    )
    weights: WeightFormat = Field(
        default="model",
        description="model: in the dtype; float16 or int8: rounded, on CPUs; auto: bfloat16 or float16 on a CPU.",
    )
    compiled: bool | None = Field(
        default=None, description="Compile kernels and record CUDA graphs when the model is loaded; None: on a GPU."
    )

    def model_post_init(self, context: Any) -> None:
        """Prepare to load the model on first use."""
        super().model_post_init(context)
        if getattr(self, self.HANDLE) is None:
            setattr(self, self.HANDLE, EngineHandle.lazy(self._load_settings()))

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Load the model by name in the process that unpickles.

        The engine of `from_engine` is not pickled, so its handle raises when it is used.
        """
        attributes = {**state["__dict__"], **(state["__pydantic_private__"] or {})}
        pickled: EngineHandle | None = attributes.get(self.HANDLE)
        super().__setstate__(state)
        is_wrapped = pickled is not None and pickled.wrapped
        setattr(self, self.HANDLE, pickled if is_wrapped else EngineHandle.lazy(self._load_settings()))

    @classmethod
    def from_engine(cls, engine: FusionEngine, **options: Any) -> Self:
        """Wrap an engine that is already loaded; its method and prompt template are used.

        Args:
            engine: the engine; closing the object leaves it open.
            **options: fields of the class.

        Raises:
            MisplacedSetting: if an option is a setting that loads engines, such as `method`.
        """
        handle = EngineHandle.wrap(engine, options=options)
        instance = cls(**{"model": engine.lm.name, **options})
        setattr(instance, cls.HANDLE, handle)
        handle.load_settings = instance._load_settings()
        return instance

    @property
    def engine(self) -> FusionEngine:
        """The engine; the model is loaded on first use."""
        return self._current_handle().engine

    def close(self) -> None:
        """Cancel running requests and free the model, unless it came from `from_engine`."""
        handle: EngineHandle | None = getattr(self, self.HANDLE)
        if handle is not None:
            handle.close()

    def sampling_params(
        self, call: Mapping[str, Any], *, max_new_tokens: int, stop: str | Sequence[str]
    ) -> SamplingParams:
        """Return the settings of an answer; a setting that is missing in the call, or None, is the field's.

        Args:
            call: keyword arguments of the call.
            max_new_tokens: limit of the answer, in tokens.
            stop: one or more strings that end the answer.

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

    def _load_settings(self) -> dict[str, Any]:
        return {"model": getattr(self, self.MODEL), **{name: getattr(self, name) for name in LOAD_SETTINGS}}

    def _current_handle(self) -> EngineHandle:
        """Return the handle, or a new one if settings were changed before the engine was loaded.

        A setting that was changed after the engine was loaded, in this object or in a copy, is a MisplacedSetting.
        """
        handle: EngineHandle | None = getattr(self, self.HANDLE)
        settings = self._load_settings()
        handle = EngineHandle.lazy(settings) if handle is None else handle.for_settings(settings)
        setattr(self, self.HANDLE, handle)
        return handle
