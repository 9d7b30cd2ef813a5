"""What `benchmarks/kernel_floors.py` times."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

import pytest
import torch

pytest.importorskip("triton")

from qcfuse_rag.runtime.fused_layers.product import STRIPS
from qcfuse_rag.runtime.kernels import launch
from tests.runtime.kernels.operands import relative_error
from tests.support.recorders import DEVICE


def test_what_the_benchmark_times_is_the_same_on_both_sides() -> None:
    timed = run_path(str(Path(__file__).parents[3] / "benchmarks" / "kernel_floors.py"))
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "num_hidden_layers": 2}
    sizes["intermediate_size"] = 48
    found = list(timed["cases"](sizes, 1030, 40, torch.float32, DEVICE))
    assert len(found) == 7 + 2 * 4
    for case in found:
        taken = case.kernel().clone()  # what is placed is placed by both at the same place
        with timed["without_kernels"]():
            assert relative_error(taken, case.plain()) < 1e-5, case.name
        assert case.nbytes > 0
    for tile in (launch.TALL, launch.Tile(64, 64), launch.Tile(16, 64), *STRIPS):
        tried = timed["others"](tile)
        assert len({tile, *tried}) == 1 + len(tried) > 4, "each once"
    tiles = [{"tile": "A", "ms": 0.5, "refusal": None}, {"tile": "B", "ms": None, "refusal": "[/tmp/x] does not fit"}]
    row = {"case": "this", "kernel_ms": 2.0, "torch_ms": 4.0, "floor_ms": 0.25, "tiles": tiles}
    assert timed["said"](row).splitlines() == [
        "this: 2.000 ms, torch 4.000 ms, 2.0 times as fast; floor 0.250 ms",
        "  A: 0.500 ms, 0.50",
        "  B: [/tmp/x] does not fit",
    ]
    assert timed["said"]({"case": "this", "refusal": "no room"}) == "this: no room"
