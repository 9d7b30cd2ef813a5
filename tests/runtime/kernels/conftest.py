"""An engine that uses kernels on this device, if need be under the interpreter."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore
from qcfuse_rag.store.prefill_base import FRAMED
from tests.runtime.kernels.passages import PASSAGES, Nearby
from tests.support.engines import make_engine
from tests.support.families import build_model
from tests.support.recorders import DEVICE

COUNTED = [
    ("attention", "sparse_attention", "sparse_attention"),
    ("by table", "paged_attention", "table_attention"),
    ("append", "paged_attention", "append_rows"),
    ("score", "context_score", "context_scores"),
    ("place", "placement", "place_blocks"),
]
"""What a kernel is called here, its module and its function; not imported, for where there is no Triton."""


@pytest.fixture
def warmed(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> FusionEngine:
    """An engine of a family of models and a format of numbers, its passages warmed without kernels.

    Ask for it before `with_kernels`.
    """
    family, numbers = getattr(request, "param", ("llama", "model"))
    store = MemoryStore()
    store.numbers = numbers
    engine = make_engine(LanguageModel.wrap(build_model(family).to(DEVICE), tokenizer), store)
    engine.warm(PASSAGES, bases=(FRAMED,))
    return engine


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have the engine use kernels on this device, if need be under the interpreter; returns what was called."""
    called: list[str] = []

    def counted(name: str, kernel: Any) -> Any:
        def call(*operands: Any, **rest: Any) -> Any:
            called.append(name)
            return kernel(*operands, **rest)

        return call

    monkeypatch.setattr("qcfuse_rag.runtime.kernels.support.kernels_run_on", lambda *given: True)
    monkeypatch.setattr("qcfuse_rag.runtime.runner.kernels_run_on", lambda *given: True)
    monkeypatch.setattr("qcfuse_rag.runtime.loading.layer_loader.supports_placement", lambda *given: True)
    if DEVICE.type == "cpu":
        monkeypatch.setattr("qcfuse_rag.runtime.runner.ModelRunner.open_transfer", lambda runner: Nearby())
    monkeypatch.setattr("qcfuse_rag.runtime.decode_step.kernels_run_on", lambda *given: True)
    for name, module, function in COUNTED:
        at = f"qcfuse_rag.runtime.kernels.{module}"
        monkeypatch.setattr(f"{at}.{function}", counted(name, resolve_name(f"{at}:{function}")))
    return called
