"""The arithmetic of a corpus, against numbers worked out by hand and against the engine's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn
from transformers import PreTrainedTokenizerFast

from benchmarks.floors import row_operations
from qcfuse_rag import LanguageModel, QCFuseError
from qcfuse_rag.cli.options import PlanOptions
from qcfuse_rag.cli.plan import ModelShape, Rates, rates_of, shape_of, size_up
from tests.support.cli import Run
from tests.support.families import build_model


def test_the_shape_of_an_8b_model() -> None:
    shape = shape_of("qwen3-8b")
    assert shape.kv == 36 * 2 * 8 * 128  # 144 KiB a token in bf16
    assert shape.attention == 4 * 36 * 32 * 128
    layer = 4096 * (32 * 128) * 2 + 4096 * (8 * 128) * 2 + 3 * 4096 * 12288
    assert shape.weights == 36 * layer
    assert shape.logit_weights == 151936 * 4096


def test_a_models_own_numbers_agree(llama: LanguageModel, model_folder: str) -> None:
    shape = shape_of(model_folder)
    assert shape.kv * 4 == llama.kv_bytes_per_token
    assert shape.operations(100, 500) + 2 * shape.logit_weights == pytest.approx(row_operations(llama, 100, 1000))


def test_layers_that_read_anothers_keys_store_nothing(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    lm = LanguageModel.wrap(build_model("gemma4-shared-keys"), tokenizer)
    lm.model.save_pretrained(tmp_path)
    shape = shape_of(str(tmp_path))
    assert shape.kv * 4 == lm.kv_bytes_per_token
    assert shape.attention == 4 * 4 * (4 * 16 + 3 * 32), "heads of two widths, in all seven layers"
    looked_up = {id(part.weight) for part in lm.model.modules() if isinstance(part, nn.Embedding)}
    assert shape.weights == sum(w.numel() for w in lm.model.parameters() if w.dim() > 1 and id(w) not in looked_up)


def test_by_hand() -> None:
    shape = ModelShape(weights=1000, logit_weights=0, attention=2, kv=10)
    rates = Rates(flops=1e6, tiers={"near": 1e6, "far": 1e3}, source="the test")
    plan = PlanOptions(nodes=3600, model="none", tokens=100, retrieved=4, ratio=0.1, kv_dtype="model", caches=3)
    found = size_up(shape, rates, plan, question_tokens=0)
    assert found.kv_bytes_per_token == 20
    assert found.corpus_bytes == 3 * 3600 * 100 * 20
    hours = 3 * 100 * (2000 + 2 * 50) / 1e6
    assert found.warming_hours == pytest.approx(hours)  # 3,600 of them
    full = 400 * (2000 + 2 * 200) / 1e6
    assert found.full_ttft_s == pytest.approx(full)
    assert found.tiers["near"].compute_s == pytest.approx(full / 10)
    assert found.tiers["near"].ttft_s == pytest.approx(full / 10), "loading takes less, and goes on beside it"
    assert found.tiers["far"].ttft_s == pytest.approx(400 * 20 / 1e3)
    assert found.tiers["far"].times_as_fast < 1, "slower than not loading at all"
    assert found.break_even_uses == pytest.approx(hours / ((full - full / 10) / 4))


def test_recomputing_everything_never_pays(run: Run) -> None:
    code, out, _ = run("plan", "--nodes", "10", "--model", "qwen3-8b", "--ratio", "1")
    assert code == 0
    assert "never pays" in out
    assert run.json("plan", "--nodes", "10", "--model", "qwen3-8b", "--ratio", "1")["break_even_uses"] is None


def test_what_is_assumed_is_said() -> None:
    assert rates_of("H200", reached=1.0).flops == 989e12
    assert "not a measurement" in rates_of("h200").source
    with pytest.raises(QCFuseError, match="`here` measures this machine"):
        rates_of("abacus")


def test_the_command(run: Run) -> None:
    code, out, _ = run("plan", "--nodes", "1000000", "--model", "qwen3-8b", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["corpus_bytes"] == 2 * 1e6 * 384 * 147456 / 2, "the default method keeps two caches, in int8"
    assert set(found["tiers"]) == {"device", "host memory", "NVMe", "network"}
    code, _, said = run("plan", "--nodes", "1", "--model", "no/such-model")
    assert code == 1
    assert "shapes are" in said


@pytest.mark.slow
def test_the_command_measures_this_machine(run: Run) -> None:
    code, out, _ = run("plan", "--nodes", "100", "--model", "smollm2-135m", "--gpu", "here")
    assert code == 0
    assert "measured here" in out
