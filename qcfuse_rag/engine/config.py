"""The options that an engine is loaded by, and warnings at the caller's line about ignored ones.

The command line reads these options, so this module imports no model code.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from qcfuse_rag.errors import NotStored, UnusedSetting
from qcfuse_rag.prompts.template import PromptTemplate

if TYPE_CHECKING:
    from qcfuse_rag.fusion.method import Method
    from qcfuse_rag.ingestion.warm_job import WarmSummary

VerdictPolicy = Literal["warn", "require", "ignore"]
"""How loading treats a method without a passing verdict."""

LOAD_SETTINGS = (
    *("store", "method", "ratio", "base"),
    *("rag_messages", "chat_template_kwargs"),
    *("device", "dtype", "weights", "compiled"),
)
"""The options that the frameworks' classes have, besides the model."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to load and how to compute with it.

    Attributes:
        model: Hugging Face id, folder or GGUF file of the model; by default that of the library, if there is one, else
            SmolLM2-135M.
        device: Device, such as cpu or cuda:0; by default a GPU if there is one.
        dtype: Data type, such as bfloat16; by default the checkpoint's on a GPU, and on a CPU float32, or bfloat16 if
            measured to be faster.
        weights: Format of weights: model (in the dtype), float16 (on CPUs), or auto: float16 on CPUs where that was
            measured to be faster. On GPUs also nf4 or int8_weight_only, quantised as the model is loaded. By default
            auto, but model for single commands: rounding takes seconds at each start.
    """

    model: str | None = None
    device: str | None = None
    dtype: str | None = None
    weights: str | None = None

    def load_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `LanguageModel.load`."""
        return {"device": self.device, "dtype": self.dtype, "weights": self.weights or "auto"}


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ModelConfig):
    """Options for loading an engine; `FusionEngine.load` takes them as keyword arguments too.

    Attributes:
        store: Folder of stored passages; None keeps passages in memory only.
        method: Fusion method, see `qcfuse methods`; auto by default.
        ratio: Share of reused tokens to recompute, 0 to 1; by default the method's own, and for auto what
            `qcfuse verify` found.
        base: Stored caches: primed, blind, begun or enriched, each with framed, or framed alone; by default those
            of the method.
        rag_messages: Messages of the RAG prompt as (role, text), with {context} and {question} once each.
        chat_template_kwargs: Variables of the model's chat template, such as {"enable_thinking": false}; by default
            those that the library was warmed with. Requests may override them.
        template: Wording of the RAG prompt; `rag_messages` and `chat_template_kwargs` replace its own.
        compiled: Compile kernels and record CUDA graphs when the model is loaded; by default on a GPU, where
            requests without recorded graphs take two to three times as long by calculation.
        check: Compare the engine with the model's own code on a few tokens before it is trusted. A comparison that has
            passed is kept; `qcfuse models check` always compares.
        verdict: What to do without a passing verdict of `qcfuse verify` on this model and method in the store's
            folder or the package: warn, require one, or ignore that there is none. A store without a folder cannot
            keep a verdict: there is no warning then.
        load_limit_s: Most seconds that a request waits for the store; chunks that have not come by then are computed.
            None waits as long as it takes.
        prefix_bytes: Most bytes of finished requests to keep in memory, so that a prompt that begins like one of them,
            as the next turn of a conversation does, does not compute its beginning again. 0 keeps nothing.
    """

    store: str | None = None
    method: str | None = None
    ratio: float | None = None
    base: str | None = None
    rag_messages: list[tuple[str, str]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    template: PromptTemplate | None = None
    compiled: bool | None = None
    check: bool = True
    verdict: VerdictPolicy = "warn"
    load_limit_s: float | None = 30.0
    prefix_bytes: int = 1 << 30

    def chosen_method(self) -> Method:
        """Return the fusion method.

        Raises:
            UnknownMethod: if there is no such method or base, or the method does not take the setting.
        """
        from qcfuse_rag.methods import choose_method

        return choose_method(self.method, ratio=self.ratio, base=self.base)

    @property
    def wording(self) -> PromptTemplate:
        """The wording of the RAG prompt.

        Raises:
            InvalidTemplate: if a placeholder is missing, repeated or unknown.
        """
        template = self.template or PromptTemplate()
        if self.rag_messages:
            template = replace(template, messages=tuple(self.rag_messages))
        if self.chat_template_kwargs is not None:
            template = replace(template, chat_template_kwargs=self.chat_template_kwargs)
        return template

    def differences(self, other: EngineConfig) -> list[str]:
        """Return the names of the options that have another value."""
        return [name for name in self.__dataclass_fields__ if getattr(self, name) != getattr(other, name)]


FRAMEWORKS = (
    "qcfuse_rag",
    "langchain_qcfuse",
    "langchain_core",
    "langchain",
    "langgraph",
    "llama_index",
    "llama_index_instrumentation",
    "pydantic",
    "wrapt",
)
"""Packages that may stand on the stack between the caller and this module."""


def warn_unused(given: Iterable[str], used: Collection[str]) -> None:
    """Warn of keyword arguments that a call ignores; frameworks pass on any argument."""
    unused = sorted(set(given).difference(used))
    if unused:
        warn_caller(f"{', '.join(unused)}: no effect here; a call takes {', '.join(used)}")


def warn_not_stored(summary: WarmSummary) -> None:
    """Warn of passages that a warming job could not store, where nothing reads its summary."""
    if summary.failed:
        _, reason = summary.failed[0]
        warn_caller(f"{len(summary.failed)} passages were not stored, the first because of: {reason}", NotStored)
    if summary.left_out:
        warn_caller(f"{summary.left_out} caches were not stored: the store has no room for them", NotStored)


def warn_caller(message: str, category: type[Warning] = UnusedSetting) -> None:
    """Warn at the innermost line outside of `FRAMEWORKS`."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in FRAMEWORKS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
