"""Recorded passes and steps of the real SmolLM2 in bfloat16 are accepted, and wrong ones are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qcfuse_rag import LanguageModel
from qcfuse_rag.runtime.fused_layers.fused_modules import FewRowProduct, fused_view, fused_view_first
from qcfuse_rag.runtime.graphs.runners import DecodeRunner, PrefillRunner
from tests.support import seams
from tests.support.recorders import AgainAndAgain
from tests.support.rounding_kernels import compute_kernels_in_torch

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_kernels_in_torch(monkeypatch)
    seams.decode_trial_lengths(monkeypatch, (5, 6, 60))


@pytest.fixture(scope="module")
def halved(smollm2: LanguageModel) -> LanguageModel:
    """SmolLM2 in bfloat16."""
    return LanguageModel.wrap(copy.deepcopy(smollm2.model).to(torch.bfloat16), smollm2.tokenizer)


def test_steps_that_round_otherwise_are_recorded(halved: LanguageModel) -> None:
    steps = DecodeRunner(halved, AgainAndAgain(), fused_view_first)
    steps.compile(requests=(1, 3))
    assert steps.refusal is None
    layer: Any = steps.model.model.layers[0]
    assert isinstance(layer.self_attn.q_proj, FewRowProduct)
    assert isinstance(layer.self_attn.o_proj, FewRowProduct)


def test_passes_that_round_otherwise_are_recorded(halved: LanguageModel) -> None:
    passes = PrefillRunner(halved, AgainAndAgain(), fused_view_first)
    passes.compile(rows=(32,))
    assert passes.refusal is None


@pytest.mark.parametrize(
    "spoil",
    [lambda out: 1.5 * out, lambda out: out.roll(1, -1)],
    ids=["half as large again", "channels exchanged"],
)
def test_steps_with_one_wrong_layer_are_not(halved: LanguageModel, spoil: Callable[[Tensor], Tensor]) -> None:
    view: Any = fused_view(halved.model)
    wrong = copy.copy(view.model.layers[20].self_attn.o_proj)
    wrong.forward = lambda hidden, own=view.model.layers[20].self_attn.o_proj: spoil(own(hidden))
    view.model.layers[20].self_attn._modules["o_proj"] = wrong
    steps = DecodeRunner(halved, AgainAndAgain(), lambda model: [view])
    steps.compile(requests=(1,))
    assert "differs from the original by" in str(steps.refusal)
