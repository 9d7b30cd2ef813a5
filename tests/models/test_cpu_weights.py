"""How a CPU computes: measured once, overruled by the user; float16 weights are near the model's and the same model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, make_method
from qcfuse_rag.errors import QCFuseError, UnsupportedModel
from qcfuse_rag.models import cpu_weights
from qcfuse_rag.models.cpu_weights import (
    CHOICES,
    SWITCH,
    WORTH,
    Float16Linear,
    PackedLinear,
    answer_seconds,
    fastest_cpu_format,
    has_float16_weights,
    multiplies,
    pack_float16,
    takes_at_most,
)
from qcfuse_rag.models.load import load_model
from qcfuse_rag.verification.exactness import measure_exactness
from tests.support import seams
from tests.support.families import build_model
from tests.support.passages import PASSAGES, QUESTION

ALL_SLOW = {"bfloat16": WORTH + 0.01, "float16": WORTH + 0.01, "float32": 1.0}
with_products = pytest.mark.skipif(not multiplies("float16"), reason="this torch has no FBGEMM")


@pytest.fixture(autouse=True)
def dtypes(assets: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(SWITCH, raising=False)
    return assets / "dtypes"


def give(patch: pytest.MonkeyPatch, seconds: dict[str, float] | None, *, bfloat16: bool, float16: bool) -> None:
    """Let the CPU multiply such numbers or not, and an answer take these seconds; None fails if asked."""

    def measured(name: str) -> float:
        return pytest.fail("measured") if seconds is None else seconds[name]

    patch.setattr(cpu_weights, "multiplies", {"bfloat16": bfloat16, "float16": float16, "float32": True}.__getitem__)
    patch.setattr(cpu_weights, "answer_seconds", measured)


def test_nothing_is_measured_where_there_is_no_choice(monkeypatch: pytest.MonkeyPatch, dtypes: Path) -> None:
    give(monkeypatch, None, bfloat16=False, float16=False)
    assert fastest_cpu_format() == "float32"
    assert not list(dtypes.glob("**/dtype.json"))


@pytest.mark.parametrize("name", CHOICES)
def test_what_torch_refuses_is_not_chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seams.torch_refuses(monkeypatch, name)
    assert not cpu_weights.multiplies(name)
    monkeypatch.setattr(cpu_weights, "answer_seconds", lambda _: pytest.fail("measured"))
    for other in {"bfloat16", "float16"} - {name}:
        seams.torch_refuses(monkeypatch, other)
    assert fastest_cpu_format() == "float32"


def test_a_torch_without_a_function_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "quantized", SimpleNamespace())
    assert not multiplies.__wrapped__("float16")


def refused() -> Callable[[], object]:
    raise RuntimeError("not on this processor")


@pytest.mark.parametrize(
    ("make", "tried"),
    [(lambda: partial(sleep, 0.01), True), (lambda: partial(sleep, 0.05), False), (refused, False)],
    ids=["as fast", "converts", "refused"],
)
def test_a_way_is_taken_if_it_works_in_time(make: Callable[[], Callable[[], object]], tried: bool) -> None:
    assert takes_at_most(2.0, partial(sleep, 0.01), make) is tried


def test_ways_are_compared_on_one_thread() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    seen: list[int] = []
    takes_at_most(2.0, lambda: seen.append(torch.get_num_threads()), refused)
    takes_at_most(2.0, lambda: seen.append(torch.get_num_threads()), lambda: partial(sleep, 0))
    assert (set(seen), torch.get_num_threads()) == ({1}, 2)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float32)])
def test_a_named_choice_that_torch_refuses_reads_the_same_caches(
    name: str, dtype: torch.dtype, model_folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain bfloat16 products work everywhere; the caches of float16 weights are those of float32."""
    monkeypatch.setenv(SWITCH, name)
    before = LanguageModel.load(model_folder, device="cpu")
    seams.torch_refuses(monkeypatch, name)
    lm = LanguageModel.load(model_folder, device="cpu")
    assert (lm.dtype, has_float16_weights(lm.model)) == (dtype, False)
    assert lm.fingerprint == before.fingerprint
    assert not any(
        isinstance(module, PackedLinear) and module.weight.dtype == torch.bfloat16 for module in lm.model.modules()
    )
    assert (f"{SWITCH}=float32 is the same" in caplog.text) is (name == "float16")
    assert measure_exactness(lm).passed


@pytest.mark.parametrize(
    ("faster", "bfloat16", "expected"),
    [
        ({"bfloat16": WORTH, "float16": 0.1}, True, "bfloat16"),  # as before there were float16 weights
        ({"bfloat16": 0.1, "float16": WORTH}, False, "float16"),
        ({"float16": WORTH}, True, "float16"),
        ({}, True, "float32"),
    ],
)
def test_the_measurement_decides_once(
    faster: dict[str, float], bfloat16: bool, expected: str, monkeypatch: pytest.MonkeyPatch, dtypes: Path
) -> None:
    give(monkeypatch, ALL_SLOW | faster, bfloat16=bfloat16, float16=True)
    assert fastest_cpu_format() == expected
    give(monkeypatch, None, bfloat16=bfloat16, float16=True)
    assert fastest_cpu_format() == expected
    (file,) = dtypes.rglob("dtype.json")
    file.write_text('{"dtype": "int4"}')
    give(monkeypatch, ALL_SLOW, bfloat16=True, float16=True)
    assert fastest_cpu_format() == "float32", "a damaged file is measured again"


def test_another_processor_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, ALL_SLOW | {"bfloat16": 0.1}, bfloat16=True, float16=True)
    assert fastest_cpu_format() == "bfloat16"
    monkeypatch.setattr(cpu_weights, "processor_name", lambda: "another")
    give(monkeypatch, ALL_SLOW, bfloat16=True, float16=True)
    assert fastest_cpu_format() == "float32"


def test_the_environment_names_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, None, bfloat16=True, float16=True)
    monkeypatch.setenv(SWITCH, "float32")
    assert fastest_cpu_format() == "float32"
    monkeypatch.setenv(SWITCH, "float8")
    with pytest.raises(ValueError, match=f"{SWITCH} must be bfloat16, float16, float32, got 'float8'"):
        fastest_cpu_format()


@pytest.mark.parametrize("refused", [True, False])
@pytest.mark.parametrize("name", ["bfloat16", "float32", pytest.param("float16", marks=with_products)])
def test_an_answer_of_each_is_measured(monkeypatch: pytest.MonkeyPatch, name: str, refused: bool) -> None:
    if refused:
        seams.torch_refuses(monkeypatch, name)
    monkeypatch.setattr(cpu_weights, "CHANNELS", 64)
    monkeypatch.setattr(cpu_weights, "WIDER", 64)
    assert answer_seconds(name) > 0


@pytest.mark.parametrize(
    ("choice", "asked", "dtype", "weights"),
    [
        ("bfloat16", {}, torch.bfloat16, "model"),
        ("bfloat16", {"dtype": "float32"}, torch.float32, "model"),
        pytest.param("bfloat16", {"weights": "float16"}, torch.float32, "float16", marks=with_products),
        pytest.param("float16", {}, torch.float32, "float16", marks=with_products),
        pytest.param("float16", {"dtype": "float32"}, torch.float32, "float16", marks=with_products),
        ("float16", {"dtype": "bfloat16"}, torch.bfloat16, "model"),
        ("float16", {"weights": "model"}, torch.float32, "model"),
        ("float32", {}, torch.float32, "model"),
    ],
)
def test_a_model_is_loaded_as_chosen_or_as_asked(
    model_folder: str, monkeypatch: pytest.MonkeyPatch, choice: str, asked: dict[str, str], dtype: Any, weights: str
) -> None:
    monkeypatch.setenv(SWITCH, choice)
    model = load_model(model_folder, device="cpu", **asked).model
    assert (model.dtype, has_float16_weights(model)) == (dtype, weights == "float16")


@with_products
def test_caches_of_float32_are_hits_for_float16_weights_and_the_answers_are_near(model_folder: str) -> None:
    """The stored caches of a library outlast the choice."""
    store, method = MemoryStore(), make_method("reuse")
    plain, rounded = (
        FusionEngine(
            LanguageModel.load(model_folder, device="cpu", dtype="float32", weights=weights), store, method=method
        )
        for weights in ("model", "float16")
    )
    assert rounded.lm.number_formats == "float32, float16 weights"
    assert rounded.lm.fingerprint == plain.lm.fingerprint
    plain.warm(PASSAGES)
    expected, found = (engine.prefill(engine.prompt(QUESTION, PASSAGES)) for engine in (plain, rounded))
    assert all(lookup.hit for lookup in found.report.lookups)
    difference = float((found.logits - expected.logits).abs().max() / expected.logits.std())
    assert 0 < difference < 1e-2
    assert measure_exactness(rounded.lm).passed


def test_float16_weights_need_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    seams.torch_refuses(monkeypatch, "float16")
    with pytest.raises(QCFuseError, match="no float16 weights on this processor; use weights='model'"):
        pack_float16(build_model("llama"))


@with_products
@pytest.mark.parametrize(("bias", "shape"), [(True, (1, 96)), (False, (2, 3, 96))])
def test_rows_are_those_of_the_rounded_weights(bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(96, 40, bias=bias).requires_grad_(False), torch.randn(shape)
    packed = Float16Linear(linear)
    linear.weight.copy_(linear.weight.half().float())
    assert torch.allclose(packed(x), linear(x), atol=1e-5)


@with_products
@pytest.mark.parametrize("tied", [True, False])
def test_the_linear_layers_and_the_output_are_rounded(tied: bool) -> None:
    model = build_model("llama", tie_word_embeddings=tied)
    before = model.get_input_embeddings().weight.clone()
    pack_float16(model)
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert not [name for name, module in model.named_modules() if type(module) is nn.Linear]
    assert isinstance(model.get_output_embeddings(), Float16Linear)


@with_products
@pytest.mark.parametrize("case", ["experts", "large"])
def test_a_model_that_does_not_fit_stays_as_it_is(
    case: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model("qwen2-moe-silent-window" if case == "experts" else "llama")
    if case == "large":
        model.model.layers[1].mlp.up_proj.weight.data[0, 0] = 7e4
    with pytest.raises(UnsupportedModel, match="load the model with weights='model'"):
        pack_float16(model)
    assert not has_float16_weights(model)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setenv(SWITCH, "float16")
    assert not has_float16_weights(load_model(str(tmp_path / "model"), device="cpu").model)
    with pytest.raises(UnsupportedModel):
        load_model(str(tmp_path / "model"), device="cpu", weights="float16")
