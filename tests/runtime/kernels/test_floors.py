"""The measurement `kernel-floors` times the same work on both sides."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.kernel_floors import LayerSizes, cases, report, without_kernels
from benchmarks.runner import Run
from tests.runtime.kernels.operands import relative_error
from tests.support.recorders import DEVICE


def test_both_sides_do_the_same_work() -> None:
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "num_hidden_layers": 2}
    all_cases = list(cases(LayerSizes.of(config, torch.float32, DEVICE), 1030, 40))
    assert len(all_cases) == 7
    for case in all_cases:
        result = case.kernel().clone()  # both sides place into the same buffer
        with without_kernels():
            assert relative_error(result, case.plain()) < 1e-5, case.name
        assert case.nbytes > 0


def test_a_case_is_shown_with_its_times_or_its_refusal() -> None:
    run = Run("kernel-floors", about={"device": "this"})
    run.add(("one",), {"kernel_ms": 2.0, "torch_ms": 4.0, "floor_ms": 0.25, "device_ms": 0.5})
    run.add(("other",), {"refusal": "no room"})
    [table] = report(run).tables
    assert list(table.rows[0]) == ["one", "2.000", "0.500", "4.000", "2.0", "0.250", "0.50"]
    assert table.rows[1][1] == "no room"
