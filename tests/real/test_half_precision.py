"""The real SmolLM2 in bfloat16 loads whatever its rounding errors are, and an engine that is wrong does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.speed import stock_model
from qcfuse_rag import LanguageModel
from qcfuse_rag.errors import UnsupportedModel
from qcfuse_rag.runtime.fused_layers.fused_modules import FewRowProduct, fused_view
from qcfuse_rag.verification import exactness
from tests.support.rounding_kernels import compute_kernels_in_torch


@pytest.fixture(scope="module")
def halved(smollm2: LanguageModel) -> LanguageModel:
    """SmolLM2 in bfloat16."""
    return LanguageModel.wrap(copy.deepcopy(stock_model(smollm2.model)).to(torch.bfloat16), smollm2.tokenizer)


def test_a_model_may_differ_by_its_own_rounding_errors(halved: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its largest difference is 0.2, and it is 0.2 from what it computes in float32."""
    monkeypatch.setitem(exactness.TOLERANCE, torch.bfloat16, 0.05)
    check = exactness.check_exact(halved)
    assert 0.05 < check.largest < check.tolerance < 1.0
    assert halved.model.dtype == torch.bfloat16, "as it was"


def test_a_wrong_engine_may_not(halved: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    forward_step = exactness.forward_step
    monkeypatch.setattr(exactness, "forward_step", lambda *given: forward_step(*given).roll(1))
    with pytest.raises(UnsupportedModel, match="does not reproduce"):
        exactness.check_exact(halved)


@pytest.fixture
def fused(halved: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    """SmolLM2 in bfloat16, in a view with fused modules."""
    pytest.importorskip("triton")
    compute_kernels_in_torch(monkeypatch)
    lm = LanguageModel.wrap(halved.model, halved.tokenizer)
    lm.__dict__["fused_model"] = fused_view(lm.model)
    return lm


def test_a_view_that_rounds_otherwise_passes(fused: LanguageModel) -> None:
    layer: Any = fused.fused_model.model.layers[0]
    assert isinstance(layer.self_attn.q_proj, FewRowProduct)
    assert isinstance(layer.self_attn.o_proj, FewRowProduct)
    assert exactness.measure_exactness(fused).passed


@pytest.mark.parametrize(
    "spoil", [lambda out: 3 * out, lambda out: out.roll(1, -1)], ids=["too large", "channels exchanged"]
)
def test_a_view_with_one_wrong_layer_does_not(fused: LanguageModel, spoil: Callable[[Tensor], Tensor]) -> None:
    attention: Any = fused.fused_model.model.layers[20].self_attn
    wrong = copy.copy(attention.o_proj)
    wrong.forward = lambda hidden, own=attention.o_proj: spoil(own(hidden))
    attention._modules["o_proj"] = wrong
    assert not exactness.measure_exactness(fused).passed
