"""The dtype of a CPU: measured where the processor multiplies bfloat16, decided once, and overruled by the user."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import cached_assets_path

from qcfuse_rag.models import cpu_dtype, kept_result
from qcfuse_rag.models.cpu_dtype import SWITCH, WORTH, answer_seconds, chosen_cpu_dtype, multiplies_bfloat16
from qcfuse_rag.models.load import load_model
from qcfuse_rag.runtime.language_model import LanguageModel

Seconds = dict[torch.dtype, float]
FAST: Seconds = {torch.bfloat16: WORTH, torch.float32: 1.0}
SLOW: Seconds = {torch.bfloat16: WORTH + 0.01, torch.float32: 1.0}


@pytest.fixture(autouse=True)
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of kept choices, which is this test's own."""
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(kept_result, "cached_assets_path", partial(cached_assets_path, assets_dir=tmp_path / "assets"))
    return tmp_path / "assets" / "qcfuse-rag" / "dtypes"


def give(monkeypatch: pytest.MonkeyPatch, *, instructions: bool, seconds: Seconds | None) -> None:
    """Let the CPU have instructions for bfloat16 or not, and products take these seconds; None fails if asked."""

    def measured(dtype: torch.dtype) -> float:
        return pytest.fail("measured") if seconds is None else seconds[dtype]

    for name in cpu_dtype.INSTRUCTIONS:
        monkeypatch.setattr(torch.cpu, name, lambda: instructions, raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(cpu_dtype, "answer_seconds", measured)


def test_nothing_is_measured_without_the_instructions(monkeypatch: pytest.MonkeyPatch, assets: Path) -> None:
    give(monkeypatch, instructions=False, seconds=None)
    assert chosen_cpu_dtype() is torch.float32
    assert not assets.exists()
    for name in cpu_dtype.INSTRUCTIONS:  # as in older versions of torch
        monkeypatch.delattr(torch.cpu, name)
    assert not multiplies_bfloat16()
    give(monkeypatch, instructions=True, seconds=None)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not multiplies_bfloat16()


@pytest.mark.parametrize(("seconds", "expected"), [(FAST, torch.bfloat16), (SLOW, torch.float32)])
def test_the_measurement_decides_once(
    seconds: Seconds, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch, assets: Path
) -> None:
    give(monkeypatch, instructions=True, seconds=seconds)
    assert chosen_cpu_dtype() is expected
    give(monkeypatch, instructions=True, seconds=None)
    assert chosen_cpu_dtype() is expected
    (kept,) = assets.rglob("dtype.json")
    assert not list(assets.rglob("*.part"))
    kept.write_text('{"dtype": "int4"}')
    give(monkeypatch, instructions=True, seconds=FAST)
    assert chosen_cpu_dtype() is torch.bfloat16, "a damaged file is measured again"


def test_another_processor_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, instructions=True, seconds=FAST)
    assert chosen_cpu_dtype() is torch.bfloat16
    monkeypatch.setattr(cpu_dtype, "processor_name", lambda: "another")
    give(monkeypatch, instructions=True, seconds=SLOW)
    assert chosen_cpu_dtype() is torch.float32


def test_a_folder_that_cannot_be_written_does_not_matter(monkeypatch: pytest.MonkeyPatch, assets: Path) -> None:
    assets.parent.mkdir(parents=True)
    assets.write_text("a file")
    give(monkeypatch, instructions=True, seconds=FAST)
    assert chosen_cpu_dtype() is torch.bfloat16


def test_the_environment_names_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, instructions=True, seconds=None)
    monkeypatch.setenv(SWITCH, "float32")
    assert chosen_cpu_dtype() is torch.float32
    monkeypatch.setenv(SWITCH, "float8")
    with pytest.raises(ValueError, match=f"{SWITCH} must be bfloat16 or float32, got 'float8'"):
        chosen_cpu_dtype()


def test_the_products_are_measured_in_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_dtype, "CHANNELS", 64)
    monkeypatch.setattr(cpu_dtype, "WIDER", 64)
    multiplied = set[tuple[str, int, torch.dtype, torch.dtype]]()

    def watched(name: str, multiply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            multiplied.add((name, len(left), left.dtype, right.dtype))
            return multiply(left, right)

        return product

    monkeypatch.setattr(cpu_dtype, "linear", watched("rows", cpu_dtype.linear))
    monkeypatch.setattr(torch, "mv", watched("row", torch.mv))
    for dtype in FAST:
        multiplied.clear()
        assert answer_seconds(dtype) > 0
        assert multiplied == {("rows", cpu_dtype.PASS_ROWS, dtype, dtype), ("row", cpu_dtype.WIDER, dtype, dtype)}


def test_a_model_is_loaded_in_the_faster_dtype_and_its_caches_are_its_own(
    model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, instructions=True, seconds=FAST)
    loaded = load_model(model_folder, device="cpu")
    model = loaded.model
    assert model.dtype == torch.bfloat16
    named = load_model(model_folder, device="cpu", dtype="float32").model
    assert named.dtype == torch.float32
    rounded = load_model(model_folder, device="cpu", weights="int8").model
    assert rounded.dtype == torch.float32, "the products of int8 weights are in float32"
    faster, plain = (LanguageModel.wrap(each, loaded.tokenizer).fingerprint for each in (model, named))
    assert "dtype" in faster.differences(plain.fields())
