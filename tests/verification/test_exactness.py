"""A passed exactness check is kept for the same model, code and machine; a failed or unreadable one never counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import qcfuse_rag
from qcfuse_rag import LanguageModel
from qcfuse_rag.errors import UnsupportedModel
from qcfuse_rag.verification import exactness
from qcfuse_rag.verification.exactness import check_exact_once
from tests.support.families import build_model


@pytest.fixture(autouse=True)
def checks(assets: Path) -> Path:
    return assets / "checks"


@pytest.fixture
def lm(tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    return LanguageModel.wrap(build_model("llama"), tokenizer)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the fingerprints of models that are compared, as they are."""
    compared: list[str] = []
    measure = exactness.measure_exactness

    def count(lm: LanguageModel) -> exactness.ExactnessCheck:
        compared.append(lm.fingerprint.digest)
        return measure(lm)

    monkeypatch.setattr(exactness, "measure_exactness", count)
    return compared


def test_a_passed_check_is_not_repeated(lm: LanguageModel, measured: list[str], checks: Path) -> None:
    first = check_exact_once(lm)
    assert first.passed
    assert check_exact_once(lm) == first
    assert len(measured) == 1
    (file,) = checks.rglob("*.json")
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_another_model_version_or_processor_is_checked_itself(
    lm: LanguageModel, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_exact_once(lm)
    check_exact_once(replace(lm, fingerprint=replace(lm.fingerprint, weights="other")))
    assert len(measured) == 2
    for module, name in ((torch, "__version__"), (exactness.transformers, "__version__"), (qcfuse_rag, "__version__")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, "0.0.1")
            check_exact_once(lm)
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
        check_exact_once(lm)
    assert len(measured) == 6
    check_exact_once(lm)
    assert len(measured) == 6


def test_a_failed_check_is_not_kept(
    lm: LanguageModel, measured: list[str], checks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(exactness.TOLERANCE, torch.float32, -1.0)
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match="does not reproduce"):
            check_exact_once(lm)
    assert len(measured) == 2
    assert list(checks.rglob("*.json")) == []


FAILED = {"all_rows": 1.0, "question_rows": 0.0, "step": 0.0, "tolerance": 0.001}


@pytest.mark.parametrize(
    "content",
    [b"\xff{", b'{"check": {}}', {"identity": {}}, {"check": FAILED}],
    ids=["no JSON", "no identity", "another model", "failed"],
)
def test_a_file_that_is_no_passed_check_of_this_model_is_replaced(
    lm: LanguageModel, measured: list[str], checks: Path, content: bytes | dict[str, object]
) -> None:
    check_exact_once(lm)
    (file,) = checks.rglob("*.json")
    changed = content if isinstance(content, bytes) else json.dumps(json.loads(file.read_text()) | content).encode()
    file.write_bytes(changed)
    check_exact_once(lm)
    check_exact_once(lm)
    assert len(measured) == 2


@pytest.mark.parametrize("tolerance", [1e-3, float("inf")])
def test_logits_that_are_no_numbers_never_pass(tolerance: float) -> None:
    difference = exactness._difference(torch.full((4,), float("nan")), torch.arange(4.0))
    check = exactness.ExactnessCheck(0.0, difference, 0.0, tolerance)
    assert not check.passed
    assert json.loads(json.dumps(check.to_dict(), allow_nan=False))["question_rows"] is None


def test_a_float32_pass_without_numbers_widens_no_tolerance(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    nan = SimpleNamespace(logits=torch.full((1, 1, 4), float("nan")))
    monkeypatch.setattr(exactness, "functional_call", lambda *_: nan)
    assert exactness._rounding_error(lm, [1], torch.arange(4.0)) == 0
