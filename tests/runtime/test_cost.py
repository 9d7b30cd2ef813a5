"""The cost model: coefficients that are measured once on a machine."""

from __future__ import annotations

import json
import weakref
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import DiskStore, FusionEngine, LanguageModel, MemoryStore, TieredStore, make_method
from qcfuse_rag.fusion.method import BreakEven
from qcfuse_rag.runtime.cost import Costs, PrefillEstimate, costs_path, measure_loading, measure_passes, read_costs
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.backends.tenant import TenantStore
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import FRAMED, ChunkKey
from tests.support import seams
from tests.support.engines import damaged, make_engine, make_warmed_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES, QUESTION

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


# --- measuring passes


def test_two_passes_give_the_costs_of_a_pass_and_of_a_row(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seams.passes_take(monkeypatch, lambda rows: 0.5 + 0.002 * rows)
    costs = measure_passes(llama)
    assert (costs.pass_s, costs.row_s) == (pytest.approx(0.5), pytest.approx(0.002))


@pytest.mark.parametrize(("scan_s", "found_s"), [(0.0, 0.0), (0.0005, 0.0005), (0.01, 0.002)])
def test_a_pass_over_the_last_rows_gives_the_cost_of_recurrences(
    scan_s: float, found_s: float, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = LanguageModel.wrap(build_model("qwen3.5-gated-delta"), tokenizer)
    seams.passes_take(monkeypatch, lambda rows: 0.5 + 0.002 * rows, scan_s)
    assert measure_passes(lm).scan_s == pytest.approx(found_s), "at most a row's"


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as on a GPU."""
    monkeypatch.setattr("qcfuse_rag.runtime.cost.overlaps", lambda _: True)
    monkeypatch.setattr("qcfuse_rag.runtime.cost.GPU_ROWS", (128, 256))


@pytest.mark.usefixtures("on_a_gpu")
def test_on_a_gpu_two_long_passes_give_the_cost_of_a_key(llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seams.passes_take(monkeypatch, lambda rows: max(0.1, 0.002 * rows + 1e-6 * rows**2))
    costs = measure_passes(llama)
    assert (costs.row_s, costs.key_s) == (pytest.approx(0.002), pytest.approx(2e-6))
    seams.passes_take(monkeypatch, lambda rows: max(0.1, 0.002 * rows - 1e-6 * rows**2))
    assert measure_passes(llama).key_s == 0, "a disturbed measurement does not make long prompts free"
    monkeypatch.setattr("qcfuse_rag.runtime.cost.GPU_ROWS", (250, 256))
    seams.passes_take(monkeypatch, lambda rows: 0.002 * rows + (0.001 if rows == 256 else 0.0))
    assert measure_passes(llama).key_s == 0, "sizes too near show noise"


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("launch_s", "row_s", "found_s"),
    [(0.1, 0.002, 0.002), (0.3, 0.0018, 0.0018), (0.43, 0.0018, 0.0018), (0.5, 0.0018, 0.0), (0.5, 0.0, 0.0)],
)
def test_a_pass_that_waits_for_the_host_tells_nothing_of_rows(
    launch_s: float, row_s: float, found_s: float, llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seams.passes_take(monkeypatch, lambda rows: max(launch_s, row_s * rows))
    costs = measure_passes(llama)
    assert (costs.pass_s, costs.row_s) == (pytest.approx(launch_s), pytest.approx(found_s))
    assert costs.partial_pass_s(500) == pytest.approx(max(launch_s, 500 * found_s))


# --- measuring loading


def test_loading_is_measured_when_there_is_something_to_load(llama: LanguageModel) -> None:
    engine = make_engine(llama, MemoryStore())
    assert engine.runner.costs().load_s == 0.0
    assert measure_loading(llama, engine.store) is None
    engine.warm(PASSAGES, bases=(FRAMED,))
    assert engine.runner.costs().load_s > 0
    other = TenantStore(engine.store, "other", bytes(16))
    assert measure_loading(llama, other) is None, "nobody reads another's entries"


def test_loading_is_measured_over_what_is_stored_blind_if_there_is_nothing_else(
    llama: LanguageModel, tmp_path: Path
) -> None:
    with DiskStore(tmp_path) as store:
        make_engine(llama, store).warm_prefix("You look after the boats of a small harbour.")
        assert make_engine(llama, store).runner.costs().load_s > 0
        assert list(tmp_path.glob("costs-*.json")), "the next process does not measure again"


def test_loading_is_timed_from_disk_and_from_memory(
    llama: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is in memory at the moment; a passage that is not there is copied there first."""
    opened, copied = list[str](), list[ChunkKV]()
    for kind in (MemoryStore, DiskStore):
        own = kind.open
        monkeypatch.setattr(kind, "open", lambda store, at, own=own: (opened.append(store.kind), own(store, at))[1])
    copy_of = MemoryStore.copy_of
    copies = list[weakref.ref[object]]()

    def watched_copy(store: MemoryStore, chunk: ChunkKV) -> ChunkKV:
        copied.append(chunk)
        assert all(copy() is not None for copy in copies), "memory that a copy has left would be page-locked already"
        copy = copy_of(store, chunk)
        copies.append(weakref.ref(copy.blocks))
        return copy

    monkeypatch.setattr(MemoryStore, "copy_of", watched_copy)
    with DiskStore(tmp_path) as far:
        make_engine(llama, far).warm(PASSAGES, bases=(FRAMED,))
        alone = measure_loading(llama, far)
        assert alone is not None
        assert alone[0] == alone[1] > 0
        store = TieredStore(MemoryStore(), far)
        for _ in range(2):
            opened.clear(), copied.clear(), copies.clear()
            found = measure_loading(llama, store)
            assert found is not None
            assert found[0] > found[1] > 0
            assert set(opened) == {far.kind}
            assert len(copied) == len(PASSAGES)
            assert store.near.stats()[0].entries == 0
            assert [copy() for copy in copies] == [None] * len(PASSAGES), "copies are dropped"


def test_a_damaged_passage_is_left_out_of_the_timing(llama: LanguageModel) -> None:
    class Damaged(MemoryStore):
        def open(self, address: str) -> tuple[ChunkKey, ChunkKV] | Miss:
            opened = super().open(address)
            first = address == next(iter(self.entries())).address
            return (opened[0], damaged(opened[1], "key.1")) if first and isinstance(opened, tuple) else opened

    store = Damaged()
    make_engine(llama, store).warm(PASSAGES, bases=(FRAMED,))
    assert measure_loading(llama, store) is not None


# --- keeping


def test_costs_of_other_kernels_attention_tiers_and_formats_are_kept_apart(
    llama: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskStore(tmp_path) as disk, TieredStore(MemoryStore(), DiskStore(tmp_path)) as tiered:
        paths = {costs_path(llama, store) for store in (disk, tiered)}
        monkeypatch.setattr("qcfuse_rag.runtime.cost.kernels_available", lambda *_: True)
        paths.add(costs_path(llama, disk))
        monkeypatch.setattr("qcfuse_rag.runtime.cost.dense_attention_name", lambda *_: "flash-attn")
        paths.add(costs_path(llama, disk))
    with DiskStore(tmp_path, kv_dtype="int8") as rounded:
        paths.add(costs_path(llama, rounded))
    assert len(paths) == 5


def test_costs_are_measured_once_and_hold_for_the_engines_life(engine: FusionEngine) -> None:
    engine.warm(PASSAGES, bases=(FRAMED,))
    first = engine.runner.costs()
    engine.prefill(engine.prompt(QUESTION, PASSAGES), method=make_method("auto", base=FRAMED))
    assert engine.runner.costs() == first
    assert first.row_s > 0
    assert first.load_s > 0


def test_costs_outlive_a_restart_and_a_damaged_file_is_measured_anew(
    llama: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskStore(tmp_path) as store:
        engine = make_warmed_engine(llama, store, bases=(FRAMED,))
        first = engine.runner.costs()
    [path] = tmp_path.glob("costs-*.json")
    seams.passes_take(monkeypatch, lambda rows: 100.0 + rows)
    with DiskStore(tmp_path) as store:
        assert make_engine(llama, store).runner.costs() == first
        path.write_text("{")
        anew = make_engine(llama, store).runner.costs()
        path.write_text(json.dumps({name: cost for name, cost in asdict(first).items() if name != "key_s"}))
        assert make_engine(llama, store).runner.costs().pass_s == anew.pass_s, "a file of another version"
    assert (anew.pass_s, anew.row_s) == (pytest.approx(100), pytest.approx(1))
    assert read_costs(path) is not None
