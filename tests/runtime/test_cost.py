"""The cost model: what six prices predict."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qcfuse_rag.fusion.method import BreakEven
from qcfuse_rag.runtime.cost import Costs, PrefillEstimate

WORK = PrefillEstimate(1000, stored_tokens=900, selected_tokens=90, probe_rows=32, probe_share=0.5)


def test_a_prefill_on_a_cpu_by_hand() -> None:
    costs = Costs(pass_s=0.1, row_s=0.001, load_s=0.0005, near_load_s=0.0001)
    assert costs.full_pass_s(1000) == pytest.approx(0.1 + 1.0)
    assert costs.full_pass_s(0) == 0
    loading = 900 * 0.0005
    probe, rows = (0.1 + 0.032) / 2, 0.1 + 0.190
    assert costs.fused_s(WORK) == pytest.approx(loading + probe + rows)
    assert costs.fused_s(WORK.all_near) == pytest.approx(900 * 0.0001 + probe + rows)


def test_a_prefill_on_a_gpu_by_hand() -> None:
    """A pass takes the longer of launching and computing; the link copies meanwhile."""
    costs = Costs(pass_s=0.1, row_s=0.001, load_s=1e-4, overlaps=True)
    assert costs.full_pass_s(50) == 0.1
    assert costs.full_pass_s(1000) == pytest.approx(1.0)
    probe, rows = 0.05, 0.190
    assert costs.fused_s(WORK) == pytest.approx(0.09 + rows), "loading takes longer than the probe"
    assert costs.fused_s(replace(WORK, probe_rows=0)) == pytest.approx(rows)
    assert replace(costs, load_s=1e-6).fused_s(WORK) == pytest.approx(probe + rows)
    recorded = replace(costs, recorded_pass_s=0.01, recorded_rows=100, load_s=0.0)
    assert recorded.fused_s(WORK) == pytest.approx(0.016 + rows), "only the probe has so few rows"
    assert recorded.full_pass_s(50) == 0.1, "full prefill is launched"


def test_rows_take_a_time_for_every_key_that_they_see() -> None:
    costs = Costs(pass_s=0.0, row_s=1e-4, key_s=1e-7)
    assert costs.full_pass_s(1000) == pytest.approx(0.1 + 1000 * 500 * 1e-7), "half of the prompt on average"
    assert costs.full_pass_s(1000, held=9000) == pytest.approx(0.1 + 1000 * 9500 * 1e-7)
    later, probe_rows, rows = replace(WORK, held_tokens=9000), 32 / 2, 190
    more = 9000 * 1e-7 * (probe_rows + rows)
    assert costs.fused_s(later) == pytest.approx(costs.fused_s(WORK) + more)


def test_recurrences_run_over_all_tokens_before_the_rows() -> None:
    costs = Costs(pass_s=0.1, row_s=0.001)
    scanning = replace(costs, scan_s=1e-4)
    assert scanning.full_pass_s(1000) == costs.full_pass_s(1000), "a row's time has it in it"
    probe, rows = (1000 - 32) / 2, 1000 - 190
    assert scanning.fused_s(WORK) == pytest.approx(costs.fused_s(WORK) + (probe + rows) * 1e-4)
    assert scanning.fused_s(replace(WORK, held_tokens=500)) == pytest.approx(scanning.fused_s(WORK) + 500 * 1.5 * 1e-4)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_tokens_on_disk_are_copied_to_memory_before_anything_is_computed(on_gpu: bool) -> None:
    costs = Costs(pass_s=0.1, row_s=1e-4, load_s=5e-5, near_load_s=1e-6, overlaps=on_gpu)
    copied_s = costs.fused_s(replace(WORK, near_tokens=400)) - costs.fused_s(WORK.all_near)
    assert copied_s == pytest.approx(500 * 4.9e-5)


def test_fusing_pays_for_less_where_passes_are_recorded() -> None:
    launched = Costs(pass_s=1.0, row_s=0.001, overlaps=True)
    assert BreakEven().refusal(WORK, launched) is not None
    assert BreakEven().refusal(WORK, replace(launched, recorded_rows=1024, recorded_pass_s=0.1)) is None


def test_a_slow_machine_takes_so_many_times_as_long_both_ways() -> None:
    costs = Costs(0.1, 0.001, 5e-5, 1e-6, 1e-7, recorded_pass_s=0.01, recorded_rows=50, scan_s=1e-4)
    slow, near = costs.at_pace(3.0), replace(WORK, near_tokens=500)
    assert slow.full_pass_s(1000) == pytest.approx(3 * costs.full_pass_s(1000))
    assert slow.fused_s(near) == pytest.approx(3 * costs.fused_s(near))
    assert replace(costs, near_load_s=None).at_pace(3.0).near_load_s is None
