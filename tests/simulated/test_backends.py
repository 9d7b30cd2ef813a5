"""On a GPU torch never attends by cuDNN, which builds a plan for every new length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import LanguageModel, MemoryStore, make_method
from qcfuse_rag.store.key import BLIND, FRAMED
from tests.simulated.cuda import moved
from tests.simulated.device import Device
from tests.support import seams
from tests.support.engines import make_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES, QUESTION


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, ...]]:
    """Collect whether cuDNN, flash, memory-efficient and plain attention are allowed, for each call on the device."""
    seen, attend = list[tuple[bool, ...]](), functional.scaled_dot_product_attention
    allowed = [
        getattr(torch.backends.cuda, f"{name}_sdp_enabled") for name in ("cudnn", "flash", "mem_efficient", "math")
    ]

    def attending(query: Tensor, *operands: Any, **options: Any) -> Tensor:
        if query.device.type == "cuda":
            seen.append(tuple(is_allowed() for is_allowed in allowed))
        return attend(query, *operands, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attending)
    return seen


@pytest.mark.parametrize("work", ["full", "rows", "steps"])
def test_torch_attends_by_the_chosen_backends(
    work: str,
    device: Device,
    backends: list[tuple[bool, ...]],
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seams.kernel_refusal(monkeypatch, lambda *_: "switched off")
    lm = LanguageModel.wrap(moved(build_model("llama", num_hidden_layers=2), device), tokenizer)
    engine = make_engine(lm, MemoryStore())
    before = torch.backends.cuda.cudnn_sdp_enabled()
    backends.clear()  # of measuring the model's windows, once
    engine.warm(PASSAGES, bases=(BLIND, FRAMED))
    prompt = engine.prompt(QUESTION, PASSAGES)
    backends.clear()
    if work == "full":
        engine.prefill(prompt, method=make_method("full"))
    elif work == "rows":
        engine.prefill(prompt, method=make_method("prophetkv", ratio=0.3, base=FRAMED))
    else:
        prefilled = engine.prefill(prompt, method=make_method("reuse", base=FRAMED), answer_tokens=1)
        backends.clear()
        engine.runner.decodes([5], [len(prompt)], [prefilled.buffer])
    assert set(backends) == {(False, True, True, True)}
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
