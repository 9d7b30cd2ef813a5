"""The budget that follows the machine: slow stores make recomputing cheap, fast ones leave what quality needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qcfuse_rag import FRAMED, DiskStore, FusionEngine, LanguageModel, MemoryStore, make_method
from qcfuse_rag.fuse import costs
from qcfuse_rag.fuse.budget import FixedRatio
from qcfuse_rag.fuse.roofline import Roofline, calibrate, slowest_sufficient
from qcfuse_rag.ingest.base import BASES
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.contract import KVStore
from tests.conftest import PASSAGES, QUESTION

SECONDS = st.floats(1e-7, 1.0)


@given(load=SECONDS, compute=SECONDS, tokens=st.integers(1, 10_000))
def test_at_the_balance_both_take_equally_long(load: float, compute: float, tokens: int) -> None:
    ratio = Roofline(load, compute, minimum=0.0).ratio
    assert 0 <= ratio <= 1
    assert ratio * tokens * compute == pytest.approx((1 - ratio) * tokens * load, rel=1e-6, abs=1e-9)


@given(load=SECONDS, compute=SECONDS, minimum=st.floats(0, 1), tokens=st.integers(0, 1000))
def test_no_other_ratio_above_the_minimum_is_faster(load: float, compute: float, minimum: float, tokens: int) -> None:
    """A slow reference: try them all."""
    budget = Roofline(load, compute, minimum)

    def takes(ratio: float) -> float:
        return max(ratio * compute, (1 - ratio) * load)

    tried = [minimum + (1 - minimum) * step / 50 for step in range(51)]
    assert takes(budget.ratio) <= min(map(takes, tried)) * (1 + 1e-9)
    assert budget.ratio >= minimum
    assert budget.tokens(tokens) == FixedRatio(budget.ratio).tokens(tokens) <= tokens


def test_a_store_without_cost_leaves_the_minimum() -> None:
    assert Roofline(0.0, 1e-3).ratio == 0.15
    assert Roofline(1e-3, 1e-3).ratio == 0.5
    assert Roofline(1.0, 1e-9).ratio <= 1.0


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((-1.0, 1.0, 0.1), "measure them with `calibrate`"),
        ((1.0, 0.0, 0.1), "measure them with `calibrate`"),
        ((1.0, 1.0, 1.1), r"fraction in \[0, 1\]"),
    ],
)
def test_what_cannot_be_is_refused(numbers: tuple[float, float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Roofline(*numbers)


def test_any_method_takes_it_for_its_budget(engine: FusionEngine) -> None:
    engine.warm(PASSAGES)
    method = make_method("qcfuse", base=FRAMED)
    fast, slow = (replace(method, budget=Roofline(load, 1e-3)) for load in (0.0, 1e-3))
    reports = [engine.prefill(engine.prompt(QUESTION, PASSAGES), method=one).report for one in (fast, slow)]
    assert [report.ratio for report in reports] == [0.15, 0.5]
    assert len(reports[0].selected) < len(reports[1].selected)


def test_calibration_measures_rows_by_two_prefills_and_loads_by_real_reads(
    llama: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that counts a pass as 1 s and 10 ms a row, and a read as 2 ms a token."""
    now = [0.0]
    rows, copy = costs.forward_rows, costs.copy_chunk

    def computing(lm: LanguageModel, ids: object, *rest: object) -> object:
        now[0] += 1.0 + 0.010 * len(ids)  # type: ignore[arg-type]
        return rows(lm, ids, *rest)  # type: ignore[arg-type]

    def loading(buffer: object, start: int, chunk: ChunkKV, **rest: object) -> int:
        now[0] += 0.002 * chunk.n_tokens
        return copy(buffer, start, chunk, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(costs, "forward_rows", computing)
    monkeypatch.setattr(costs, "copy_chunk", loading)
    monkeypatch.setattr(costs.time, "perf_counter", lambda: now[0])
    with DiskStore(tmp_path) as store:
        FusionEngine(llama, store).warm(PASSAGES)
        found = calibrate(llama, store, minimum=0.1, samples=3)
    assert found.compute_s_per_token == pytest.approx(0.010)
    assert found.load_s_per_token == pytest.approx(0.002)
    assert found.ratio == pytest.approx(0.002 / 0.012)


@pytest.mark.parametrize("on_disk", [True, False])
def test_calibration_on_the_real_clock_changes_nothing(llama: LanguageModel, tmp_path: Path, on_disk: bool) -> None:
    store: KVStore = DiskStore(tmp_path) if on_disk else MemoryStore()
    FusionEngine(llama, store).warm(PASSAGES)
    before = store.stats()
    found = calibrate(llama, store, samples=3)
    assert found.load_s_per_token > 0
    assert 0.15 <= found.ratio <= 1
    assert store.stats() == before
    store.close()


def test_calibration_passes_over_what_is_damaged_and_what_was_captured(llama: LanguageModel, tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        engine = FusionEngine(llama, store)
        engine.warm(PASSAGES)
        engine.capture([PASSAGES], keep=("patch",))
        sound = engine.keys(engine.prompts.chunk_ids(PASSAGES[2]), [FRAMED])[0]
        for address, path in store.files.entries():
            opened = store.open(address)
            assert isinstance(opened, tuple)
            if opened[0].base in BASES and opened[0] != sound:
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 0xFF
                path.write_bytes(data)
    with DiskStore(tmp_path) as store:
        assert calibrate(llama, store, samples=3, sizes=(4, 8)).load_s_per_token > 0
        store.discard(sound)
        with pytest.raises(ValueError, match="no passages of this model"):
            calibrate(llama, store, samples=3, sizes=(4, 8))


def test_there_must_be_something_to_load(llama: LanguageModel) -> None:
    with pytest.raises(ValueError, match="warm some first"):
        calibrate(llama, MemoryStore())
    with pytest.raises(ValueError, match="within the window"):
        calibrate(llama, MemoryStore(), sizes=(64, 100_000))


def test_the_slowest_device_that_hides_behind_recomputing_is_chosen() -> None:
    devices = [("memory", 20e9), ("nvme", 3e9), ("ssd", 0.5e9), ("disk", 0.1e9)]
    # 15 % of 0.4 ms a token hide 60 us: 128 kB at 2.2 GB a second.
    choice = {"bytes_per_token": 131072.0, "compute_s_per_token": 0.4e-3}
    assert slowest_sufficient(devices, **choice) == "nvme"
    assert slowest_sufficient(devices, **choice, ratio=1.0) == "ssd"
    assert slowest_sufficient(devices[:1], **choice) == "memory"
    with pytest.raises(ValueError, match="recompute more, or store in int8 or fp8"):
        slowest_sufficient(devices[2:], **choice)
