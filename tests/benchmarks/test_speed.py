"""The command `speed`: floors that are counted right, tiers that are what they say, and a result one can read."""

from __future__ import annotations

import io
import json
import statistics
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.integrations.bitnet import BitLinear

from benchmarks.quality.configurations import configurations
from benchmarks.speed.ceilings import Ceilings, add_floors, row_operations, step_bytes
from benchmarks.speed.measure import (
    STEPS,
    SpeedOptions,
    measure_speed,
    peak_bytes,
    random_prompt,
    stock_steps,
)
from benchmarks.speed.shapes import SHAPES, random_model
from benchmarks.speed.tables import terminal_tables
from benchmarks.speed.tiers import ThrottledStore
from qcfuse_rag import LanguageModel, MemoryStore, QCFuseError, make_method
from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.fusion.pipeline import fuse_prompt
from qcfuse_rag.models.weights.formats import HeldFormat, round_weights
from qcfuse_rag.runtime.cost import Costs, LoadTimes
from qcfuse_rag.runtime.decode_step import forward_step
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.testing import example_chunk, example_key
from qcfuse_rag.verification.exactness import stock_attention
from tests.support import seams
from tests.support.cli import Run

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
    seams.measured_ceilings(monkeypatch, lambda lm: Ceilings(1e11, 1e10, 5e9))
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    return random_model("tiny", device="cpu")


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


@pytest.mark.parametrize(("weights", "size"), [("float16", 2), ("int8", 1)])
def test_packed_weights_are_counted_as_they_are_held(tiny: LanguageModel, weights: HeldFormat, size: int) -> None:
    operations = row_operations(tiny, 100, 200)
    linears = [module for module in tiny.model.modules() if isinstance(module, nn.Linear)]
    numbers = sum(linear.weight.numel() for linear in linears)
    scales = sum(linear.out_features for linear in linears) if weights == "int8" else 0
    norms = step_bytes(tiny, 0) - 4 * numbers
    round_weights(tiny.model, weights)
    assert row_operations(tiny, 100, 200) == operations
    assert step_bytes(tiny, 0) == size * numbers + 4 * scales + norms
    saved = {name: x.nbytes for name, x in tiny.model.state_dict().items() if "embed_tokens" not in name}
    assert step_bytes(tiny, 0) == sum(saved.values())


def test_weights_in_buffers_of_several_numbers_a_byte_are_counted(tiny: LanguageModel) -> None:
    """As BitNet's four in a byte; layers of GPTQ and AWQ have buffers too."""
    operations, read = row_operations(tiny, 100, 200), step_bytes(tiny, 0)
    for layer in tiny.model.model.layers:
        layer.mlp.up_proj = BitLinear(64, 96, bias=False, dtype=torch.float32)
    assert row_operations(tiny, 100, 200) == operations
    assert step_bytes(tiny, 0) == read - 3 * 64 * 96 * 4 + 3 * (64 * 96 // 4 + 4)


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_of_bitsandbytes_are_counted(tiny: LanguageModel, bits: int) -> None:
    bnb = pytest.importorskip("bitsandbytes").nn
    operations, read = row_operations(tiny, 100, 200), step_bytes(tiny, 0)
    layer = tiny.model.model.layers[0]
    if bits == 4:
        packed = bnb.Linear4bit(64, 96, bias=False)
    else:
        packed = bnb.Linear8bitLt(64, 96, bias=False, has_fp16_weights=False)
    packed.load_state_dict(layer.mlp.up_proj.state_dict())
    layer.mlp.up_proj = packed.to("cpu")
    described = ("weight_format", "weight.quant_state.")  # no numbers of the product
    saved = sum(x.nbytes for name, x in packed.state_dict().items() if not name.startswith(described))
    for _ in range(2):  # 8 bits move their scales at the first call
        assert row_operations(tiny, 100, 200) == operations
        assert step_bytes(tiny, 0) == read - 64 * 96 * 4 + saved
        packed(torch.randn(1, 64))
    assert saved < 64 * 96 * 4


def test_peak_memory_is_what_was_held_at_once() -> None:
    def run() -> torch.Tensor:
        first = torch.ones(1000)
        second = first + 1
        del first
        return second.clone()

    assert peak_bytes(torch.device("cpu"), run) == pytest.approx(8000, abs=64)


@pytest.mark.slow
def test_a_request_takes_its_buffer_and_a_layers_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Placing, probing and recomputing hold no second copy of the prompt's keys and values."""
    seams.measured_ceilings(monkeypatch, lambda lm: Ceilings(1e11, 1e10, 5e9))
    slack, layer_bytes = [], 0.0
    for layers in (3, 9):
        shape = {"head_dim": 64, "num_key_value_heads": 4, "num_hidden_layers": layers}
        monkeypatch.setitem(SHAPES, "tiny", {**TINY, **shape})
        lm = random_model("tiny", device="cpu")
        options = SpeedOptions((2000,), tuple(configurations(["prophetkv"], [0.05])[1:]), repeats=1, requests=())
        rounds = [measure_speed(lm, options)["prefill"][1] for _ in range(3)]
        buffer_bytes = rounds[0]["buffer_bytes"]
        layer_bytes = buffer_bytes / lm.n_layers
        slack.append(statistics.median(fused["peak_bytes"] for fused in rounds) - buffer_bytes)
        assert 0 < slack[-1] < layer_bytes
    # The loader's thread may be ahead by some of a layer at the peak, or behind. Bytes kept for each layer would count
    # six times: the recomputed 5 % alone would be 0.3 of a layer.
    assert slack[1] - slack[0] < 0.2 * layer_bytes, "the slack grows with the layers"


def test_a_throttled_store_reads_as_slowly_as_it_says() -> None:
    store = ThrottledStore(1e5)
    own = example_chunk(1, n_tokens=40)
    store.put(example_key(1), own)
    found = store.get(example_key(1))
    assert isinstance(found, ChunkKV)
    started = time.perf_counter()
    found.read()
    assert time.perf_counter() - started >= 0.95 * own.nbytes / 1e5


@pytest.mark.slow
def test_sides_are_measured_on_the_same_tokens(tiny: LanguageModel) -> None:
    methods = tuple(configurations(["auto[guard=false]", "reuse"], [0.1])[1:])
    found = measure_speed(
        tiny, SpeedOptions((100, 230), methods, ("memory", "disk", "throttled"), chunk=64, repeats=1, requests=(1, 2))
    )
    rows = found["prefill"]
    assert [row["context"] for row in rows] == [100] * 7 + [230] * 7
    assert {row["prompt"] for row in rows[:7]} == {164}
    assert [row["tier"] for row in rows[:3]] == ["-", "memory", "memory"]
    full, fused = rows[7], rows[8]
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


@pytest.mark.slow
@pytest.mark.parametrize(("row_s", "fuses"), [(1.0, True), (1e-9, False)])
def test_methods_run_with_their_guard(
    row_s: float, fuses: bool, tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method whose guard refuses takes full prefill's time."""
    seams.measured_passes(monkeypatch, lambda *_: Costs(pass_s=0.5, row_s=row_s))
    seams.measured_loading(monkeypatch, lambda *_: LoadTimes(1e-6, 1e-6))
    methods = tuple(configurations(["auto"], [0.1])[1:])
    found = measure_speed(tiny, SpeedOptions((230,), methods, chunk=64, repeats=1, requests=()))
    full, auto = found["prefill"]
    assert (auto["rows"] < auto["prompt"]) == fuses
    full_s = 0.5 + auto["prompt"] * row_s
    assert auto["predicted_s"] == full_s if not fuses else 0 < auto["predicted_s"] < 0.9 * full_s
    assert (full["predicted_s"], full["fallback"]) == (None, None)
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(terminal_tables(found, 300)[0])
    assert f"{'fuses' if fuses else 'in full'}, {1000 * auto['predicted_s']:,.1f} ms" in console.export_text()


def test_transformers_own_steps_go_on_from_the_same_keys(tiny: LanguageModel) -> None:
    prompt = random_prompt(tiny, 100, 64, torch.Generator().manual_seed(0))
    done = fuse_prompt(ModelRunner(tiny, MemoryStore(1)), prompt, make_method("full"), answer_tokens=STEPS)
    stock = dict(stock_steps(tiny, done.buffer, len(prompt), token=7))
    assert set(stock) == {"dynamic", "static"}
    for position in range(len(prompt), len(prompt) + STEPS):
        ours = forward_step(tiny, [7], [position], [done.buffer])[0]
        for step in stock.values():
            with stock_attention(tiny), torch.inference_mode():
                assert torch.allclose(step()[0, -1], ours, atol=1e-4)


def test_configurations_of_one_method_are_told_apart_on_a_narrow_terminal(tiny: LanguageModel) -> None:
    chosen = configurations(["auto[ratio=.1]", "auto[ratio=.1,layers=third_quarter]"])[1:]
    found = measure_speed(tiny, SpeedOptions((230,), tuple(chosen), chunk=64, repeats=1, requests=(1,)))
    labels = [row["method"] for row in found["prefill"]]
    assert labels == ["full", "auto[ratio=.1]", "auto[ratio=.1,layers=third_quarter]"]
    for width in (80, 300):
        console = Console(width=width, record=True, file=io.StringIO())
        for table in terminal_tables(found, width):
            console.print(table)
        shown = console.export_text()
        assert "…" not in shown
        assert all(f"{1000 * row['ttft_s']:,.1f} ms" in shown for row in found["prefill"])
    assert "│ auto[ratio=.1,layers=third_quarter] │" in shown, "and no parameter is taken for markup"


@pytest.mark.slow
def test_a_tier_keeps_passages_in_each_format(tiny: LanguageModel) -> None:
    options = SpeedOptions(
        (230,),
        tuple(configurations(["reuse"])[1:]),
        ("memory", "disk", "throttled"),
        ("int8", "model"),
        chunk=64,
        repeats=1,
        requests=(1,),
    )
    found = measure_speed(tiny, options)
    rows = {(row["tier"], row["numbers"]): row["bytes_loaded"] for row in found["prefill"][1:]}
    assert len(rows) == 6
    for tier in options.tiers:
        assert 0.25 < rows[tier, "int8"] / rows[tier, "model"] < 0.4, "a byte for a number of four, and scales"
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(terminal_tables(found, 300)[0])
    shown = console.export_text()
    cells = {cell.strip() for cell in shown.split("│")}
    assert {f"{tier}{numbers}" for tier in options.tiers for numbers in ("", " int8")} <= cells


def test_floors_follow_the_best_rates_that_were_found() -> None:
    """A machine may be slow while its rates are measured, and a floor above what was measured is none."""
    slow, fast = Ceilings(1e9, 4e9, 2e9), Ceilings(3e9, 5e9, 1e9)
    best = slow.or_better(fast)
    assert best == fast.or_better(slow) == Ceilings(3e9, 5e9, 2e9)
    row = {"operations": 6e9, "full_operations": 2.4e10, "bytes_loaded": 1e9, "ttft_s": 4.0}
    prefill = [{**row, "tier": tier} for tier in ("memory", "device", "throttled")]
    result = {"prefill": prefill, "decode": [{"bytes": 1e9, "step_s": 0.5}]}
    add_floors(result, best, throttle=2.5e8)
    assert [row["arithmetic_s"] for row in prefill] == [2.0] * 3
    assert [row["loading_s"] for row in prefill] == [0.5, 0.4, 4.0]
    assert [row["of_floor"] for row in prefill] == [0.5, 0.5, 1.0]
    assert [row["speedup_calculated"] for row in prefill] == [2.0] * 3, "full prefill's arithmetic takes 8 s"
    assert result["decode"][0]["bytes_s"] == 0.2
    assert result["decode"][0]["of_floor"] == 0.4
    assert result["ceilings"] == {"flops": 3e9, "memory_bytes_s": 5e9, "loading_bytes_s": 2e9}


def test_what_cannot_be_measured_is_said(tiny: LanguageModel) -> None:
    with pytest.raises(QCFuseError, match="no shape 'gpt-9'; there are smollm2-135m"):
        random_model("gpt-9")
    with pytest.raises(QCFuseError, match="no dtype 'float99'"):
        random_model("tiny", dtype="float99")
    with pytest.raises(QCFuseError, match="no tier 'pinned' on cpu; there are memory, disk, throttled"):
        measure_speed(tiny, SpeedOptions(tiers=("pinned",)))
    with pytest.raises(QCFuseError, match="no format of numbers 'int4'; there are model, int8, fp8"):
        measure_speed(tiny, SpeedOptions(numbers=("int4",)))
    with pytest.raises(PromptTooLong, match="200,000"):
        measure_speed(tiny, SpeedOptions((200_000,)))


@pytest.mark.slow
def test_the_command_writes_json_a_page_and_a_picture(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    out = tmp_path / "speed.json"
    shown = run.json(
        *("speed", "--shape", "tiny", "--device", "cpu", "--context", "100,200", "--chunk", 50),
        *("--ratios", ".1", "--requests", "1", "--repeats", 1, "--out", out),
    )
    assert json.loads(out.read_text()) == shown
    assert shown["about"]["kernels"] == "there are none for cpu"
    page = out.with_suffix(".md").read_text()
    assert page.count("\n| ") == 2 * 3 + 2 + 2, "a line for each side and context, and the headings"
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    code, _, err = run("speed", "--shape", "tiny", "--model", "x")
    assert (code, "not both" in err) == (1, True)


@pytest.mark.slow
def test_what_was_measured_is_kept_where_no_picture_can_be_drawn(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = tmp_path / "speed.json"
    code, shown, _ = run(
        *("speed", "--shape", "tiny", "--device", "cpu", "--context", "100", "--chunk", 50, "--ratios", ".1"),
        *("--numbers", "", "--requests", "1", "--repeats", 1, "--out", out),
    )
    assert code == 0
    assert "speed.md" in shown
    assert "no picture: plots need matplotlib" in shown
    assert {row["numbers"] for row in json.loads(out.read_text())["prefill"]} == {"model"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["speed.json", "speed.md"]
