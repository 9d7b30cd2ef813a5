"""An engine that uses kernels on this device, in the interpreter on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore
from qcfuse_rag.store.key import FRAMED
from tests.runtime.kernels.passages import PASSAGES, Nearby
from tests.support import seams
from tests.support.engines import make_engine
from tests.support.families import build_model
from tests.support.recorders import DEVICE


@pytest.fixture
def warmed(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> FusionEngine:
    """An engine of a model family and a storage format, whose passages were warmed without kernels.

    Request it before `with_kernels`.
    """
    family, kv_dtype = getattr(request, "param", ("llama", "model"))
    store = MemoryStore()
    store.kv_dtype = kv_dtype
    engine = make_engine(LanguageModel.wrap(build_model(family).to(DEVICE), tokenizer), store)
    engine.warm(PASSAGES, bases=(FRAMED,))
    return engine


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make the engine use kernels on this device, in the interpreter on a CPU; return the names of called kernels."""
    called: list[str] = []

    def counted(name: str, kernel: Any) -> Any:
        def call(*operands: Any, **rest: Any) -> Any:
            called.append(name)
            return kernel(*operands, **rest)

        return call

    seams.engine_has_kernels(monkeypatch, lambda *_: True)
    if DEVICE.type == "cpu":
        seams.transfer(monkeypatch, lambda transfers: Nearby())
    for name, kernel in seams.KERNELS.items():
        kernel(monkeypatch, counted(name, kernel.original))
    return called
