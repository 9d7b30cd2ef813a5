"""The measurements of speed: floors that are counted right, sides on the same tokens, and a result one can read."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedTokenizerFast

from benchmarks import speed, store
from benchmarks.floors import SHAPES, Ceilings, random_model, row_operations, step_bytes
from benchmarks.runner import Run as Records
from benchmarks.speed import STEPS, clone, fill, peak_bytes, random_prompt, report, stock_steps
from benchmarks.store import COLD
from qcfuse_rag import LanguageModel, MemoryStore, QCFuseError, make_method
from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.fusion.pipeline import fuse_prompt
from qcfuse_rag.models.cpu_weights import multiplies, pack_float16
from qcfuse_rag.runtime.forward import forward_step
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.verification.exactness import stock_attention
from tests.support.cli import Run
from tests.support.families import build_model

TINY = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    """Return a tiny model, on a machine whose rates need not be measured: that takes seconds."""
    monkeypatch.setattr("benchmarks.speed.measure_ceilings", lambda *_: Ceilings(1e11, 1e10, 5e9))
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    return random_model("tiny", device="cpu")


def measured_run(lm: LanguageModel, **options: Any) -> Records:
    run = Records("speed")
    speed.measure_model(lm, speed.Options(**{"ratios": "0.1", "repeats": 1, **options}), run)
    return run


def measured(lm: LanguageModel, **options: Any) -> Any:
    return report(measured_run(lm, **options)).summary


def test_shapes_have_the_published_numbers_of_parameters() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    billions = {"smollm2-135m": 0.1345, "qwen3-0.6b": 0.596, "qwen3-8b": 8.19, "qwen3-32b": 32.76, "llama-3.1-8b": 8.03}
    assert set(billions) == set(SHAPES)
    for name, expected in billions.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[name]))
        parameters = {id(weight): weight.numel() for weight in model.parameters()}
        assert sum(parameters.values()) / 1e9 == pytest.approx(expected, rel=0.005), name


def test_operations_are_those_torch_counts(tiny: LanguageModel) -> None:
    """Of full prefill; torch counts attention's upper half too, which need not be computed.

    And the angles of rotations, where transformers gets them by a product: 16 operations a token.
    """
    tokens = 200
    ids = torch.randint(512, (1, tokens))
    tiny.model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        tiny.model(input_ids=ids, logits_to_keep=1)
    attention = 3 * 4 * 2 * (16 + 16) * tokens * tokens / 2
    assert row_operations(tiny, tokens, tokens) == pytest.approx(counter.get_total_flops() - attention, abs=16 * tokens)


def test_a_step_reads_the_weights_once_and_each_requests_cache(tiny: LanguageModel) -> None:
    read = sum(weight.nbytes for weight in tiny.model.parameters()) - tiny.model.get_input_embeddings().weight.nbytes
    assert step_bytes(tiny, 0) == read
    assert step_bytes(tiny, 100, 3) - step_bytes(tiny, 0) == 300 * tiny.kv_bytes_per_token


@pytest.mark.skipif(not multiplies("float16"), reason="this torch has no FBGEMM")
def test_packed_weights_are_counted_as_they_are_held(tiny: LanguageModel) -> None:
    operations, read = row_operations(tiny, 100, 200), step_bytes(tiny, 0)
    numbers = sum(module.weight.numel() for module in tiny.model.modules() if isinstance(module, nn.Linear))
    pack_float16(tiny.model)
    assert row_operations(tiny, 100, 200) == operations
    assert step_bytes(tiny, 0) == read - 2 * numbers


@pytest.mark.slow
def test_a_request_takes_its_buffer_and_a_layers_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Placing, probing and recomputing hold no second copy of the prompt's keys and values."""
    slack, layer_bytes, method = [], 0.0, make_method("prophetkv", ratio=0.05)
    for layers in (3, 9):
        shape = {"head_dim": 64, "num_key_value_heads": 4, "num_hidden_layers": layers}
        monkeypatch.setitem(SHAPES, "tiny", {**TINY, **shape})
        lm, store = random_model("tiny", device="cpu"), MemoryStore()
        prompt = random_prompt(lm, 2000, 512, torch.Generator().manual_seed(0))
        fill(lm, [store], prompt, [method])
        runner = ModelRunner(lm, store)
        runner.pool = None  # torch counts only the memory that it allocates itself
        peaks = [peak_bytes(lm.device, lambda: fuse_prompt(runner, prompt, method)) for _ in range(3)]  # noqa: B023
        buffer_bytes = len(prompt) * lm.kv_bytes_per_token
        layer_bytes = buffer_bytes / lm.n_layers
        slack.append(statistics.median(peaks) - buffer_bytes)
        assert 0 < slack[-1] < layer_bytes
    # The loader's thread may be ahead by some of a layer at the peak, or behind. Bytes kept for each layer would count
    # six times: the recomputed 5 % alone would be 0.3 of a layer.
    assert slack[1] - slack[0] < 0.2 * layer_bytes, "the slack grows with the layers"


@pytest.mark.slow
def test_sides_are_measured_on_the_same_tokens(tiny: LanguageModel) -> None:
    found = measured(
        tiny, context="100,230", methods="auto[guard=false],reuse", tiers="memory,disk", chunk=64, requests="1,2"
    )
    rows = found["prefill"]
    assert [row["context"] for row in rows] == [100] * 5 + [230] * 5
    assert {row["prompt"] for row in rows[:5]} == {164}
    assert [row["tier"] for row in rows[:3]] == ["-", "memory", "memory"]
    full, fused = rows[5], rows[6]
    assert full["rows"] == full["prompt"]
    assert fused["rows"] < 100
    assert fused["bytes_loaded"] > 0
    assert fused["arithmetic_s"] < full["arithmetic_s"]
    assert [row["requests"] for row in found["decode"]] == [1, 2, 1, 2]
    assert [row["transformers_step_s"] is None for row in found["decode"]] == [False, True, False, True]
    assert found["decode"][0]["transformers_cache"] in ("dynamic", "static")
    with stock_attention(tiny):
        pass  # the model still has ours afterwards
    assert tiny.model.config._attn_implementation == "qcfuse"


@pytest.mark.parametrize("name", ["llama", "deepseek2-latent", "qwen3.5-gated-delta"])
def test_steps_of_both_sides_go_on_behind_the_same_prompt(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    family = LanguageModel.wrap(build_model(name), tokenizer, name=name)
    prompt = random_prompt(family, 100, 64, torch.Generator().manual_seed(0))
    done = fuse_prompt(ModelRunner(family, MemoryStore(1)), prompt, make_method("full"), answer_tokens=STEPS)
    stock = dict(stock_steps(family, prompt.ids, token=7))
    assert set(stock) == {"dynamic", "static"}
    buffer = clone(done.buffer)
    for position in range(len(prompt), len(prompt) + STEPS):
        ours = forward_step(family, [7], [position], [buffer])[0]
        for step in stock.values():
            with stock_attention(family), torch.inference_mode():
                assert torch.allclose(step()[0, -1], ours, atol=1e-4)


def test_floors_follow_the_best_rates_that_were_found() -> None:
    """A machine may be slow while its rates are measured, and a floor above what was measured is none."""
    run = Records("speed", about={"model": "m"})
    for number, rates in enumerate(((1e9, 4e9, 2e9), (3e9, 5e9, 1e9))):
        run.add(("ceilings", number), dict(zip(("flops", "memory", "loading"), rates, strict=True)))
    counted = {"rows": 1, "operations": 6e9, "bytes_loaded": 1e9, "recorded_passes": 0, "fallback": None}
    times = {"ttft_s": 4.0, "load_s": 0.0, "probe_s": 0.0, "recompute_s": 4.0, "predicted_s": None}
    for side in (("transformers", None, "-"), ("full", None, "-"), ("reuse", 0.0, "memory"), ("reuse", 0.0, "device")):
        run.add(("prefill", 9, *side, "model", 0), {**counted, **times})
    run.add(("prompt", 9), {"full_operations": 2.4e10, "buffer_bytes": 1})
    run.add(("decode", 9, 1), {"bytes": 1e9, "step_s": 0.5, "context": 9, "requests": 1, "tokens_per_s": 2.0,
                               "transformers_step_s": None, "transformers_cache": None})  # fmt: skip
    found = report(run).summary
    assert found["ceilings"] == {"flops": 3e9, "memory": 5e9, "loading": 2e9}
    _, near, device = found["prefill"]
    assert [row["arithmetic_s"] for row in (near, device)] == [2.0, 2.0]
    assert [row["loading_s"] for row in (near, device)] == [0.5, 0.4]
    assert [row["of_floor"] for row in (near, device)] == [0.5, 0.5]
    assert near["speedup_calculated"] == 2.0, "full prefill's arithmetic takes 8 s"
    assert found["decode"][0]["bytes_s"] == 0.2


def test_what_cannot_be_measured_is_said(tiny: LanguageModel) -> None:
    with pytest.raises(QCFuseError, match="no shape 'gpt-9'; there are smollm2-135m"):
        random_model("gpt-9")
    for options, says in (
        ({"tiers": "pinned"}, "no tier 'pinned' on cpu; there are memory, disk"),
        ({"context": "many"}, "'many' is no list of whole numbers"),
    ):
        with pytest.raises(QCFuseError, match=says):
            measured(tiny, **options)
    with pytest.raises(PromptTooLong, match="200,000"):
        measured(tiny, context="200000")


@pytest.mark.slow
def test_a_warming_job_is_measured_beside_its_forward_passes(run: Run, model_folder: str, tmp_path: Path) -> None:
    out = tmp_path / "warm.json"
    options = ("--model", model_folder, "--device", "cpu", "--chunks", 3, "--repeats", 2)
    assert "warming job" in run.text("warm", *options, "--json", out)
    result = json.loads(out.read_text())
    assert (len(result["job_s"]), len(result["bare_s"]), result["computed_share"] >= 1) == (2, 2, True)


def test_a_store_is_measured_with_every_number_of_threads(tmp_path: Path) -> None:
    run = Records("store")
    store.measure(
        store.Options(folder=tmp_path, mb=1, repeats=2, threads="1,3"), run, ((2, 2, 16, 200, torch.bfloat16),)
    )
    rates = store.report(run).summary["rates"]
    operations = {rate["operation"] for rate in rates}
    assert (len(operations), {rate["threads"] for rate in rates}) == (4 if COLD in operations else 2, {1, 3})
    assert all(min(rate["store_mb_s"], rate["bare_mb_s"], rate["of_bare"]) > 0 for rate in rates)
    assert list(tmp_path.iterdir()) == []
