"""The real SmolLM2 in bfloat16 loads whatever its rounding errors are, and an engine that is wrong does not."""

from __future__ import annotations

import copy

import pytest
import torch

from qcfuse_rag import LanguageModel
from qcfuse_rag.errors import UnsupportedModel
from qcfuse_rag.verification import exactness


@pytest.fixture(scope="module")
def halved(smollm2: LanguageModel) -> LanguageModel:
    """SmolLM2 in bfloat16."""
    return LanguageModel.wrap(copy.deepcopy(smollm2.model).to(torch.bfloat16), smollm2.tokenizer)


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
