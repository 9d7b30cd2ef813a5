"""The costs of passes and loading are learned from what is run, and a wrong one does not stay."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import DiskStore, LanguageModel, MemoryStore, TieredStore
from qcfuse_rag.fusion.method import BreakEven
from qcfuse_rag.runtime.cost import Costs, PrefillEstimate
from qcfuse_rag.runtime.graphs.runners import PrefillRunner
from qcfuse_rag.runtime.learned_costs import HALF_LIFE_S, LearnedCosts, Sample, costs_path, read_samples
from tests.support.families import build_model

CPU = Costs(pass_s=0.05, row_s=0.002, key_s=5e-6, load_s=4e-5, near_load_s=1e-5)
DAY_S = 86400.0


def prompt(passages: int, *, near: bool = True, held: int = 0) -> PrefillEstimate:
    """Return a prompt of passages of 300 tokens, all stored, of which a tenth is recomputed."""
    stored = 300 * passages + 30
    return PrefillEstimate(
        stored + 50, stored, 30 * passages, 50, 1.0, near_tokens=stored if near else 0, held_tokens=held
    )


PROMPTS = [prompt(6), prompt(2), prompt(12), prompt(4), prompt(8)]


@dataclass
class Machine:
    """Takes what true costs say, and longer when something else runs."""

    true: Costs
    noise: random.Random = field(default_factory=lambda: random.Random(0))

    def took(self, seconds: float) -> float:
        """Return a time that is a little longer than it need be, and sometimes much."""
        return seconds * (1 + self.noise.expovariate(10)) * (3 if self.noise.random() < 0.1 else 1)

    def ask(self, learned: LearnedCosts, asked: PrefillEstimate) -> float | None:
        """Do what the guard decides, as `fusion.pipeline` does; return the error of the prediction as a factor."""
        costs, guard = learned(), BreakEven()
        free = costs and replace(costs, load_s=0.0, near_load_s=0.0)
        if costs and guard.refusal(asked, costs):
            if guard.refusal(asked, free) or not learned.tries_again():
                asked = replace(asked, stored_tokens=0, near_tokens=0, selected_tokens=0, probe_rows=0)
        else:
            learned.refusals = 0
        length, loaded = asked.held_tokens + asked.prompt_tokens, replace(asked, selected_tokens=0)
        load_s = self.true.fused_s(loaded) - replace(self.true, load_s=0.0, near_load_s=0.0).fused_s(loaded)
        stages = {
            "load_s": self.took(load_s),
            "probe_s": self.took(self.true.partial_pass_s(asked.probe_rows, length)),
            "recompute_s": self.took(self.true.partial_pass_s(asked.rows, self.true.keys_of_rows(asked))),
        }
        learned.observe_prefill(asked, **stages)
        for step in range(5):
            learned.observe_pass(1, length + step, self.took(self.true.partial_pass_s(1, length)))
        if costs is None:
            return None
        predicted = costs.fused_s(asked) if asked.stored_tokens else costs.full_pass_s(asked.prompt_tokens)
        return predicted / sum(stages.values())


def full_and_fused_s(costs: Costs, asked: PrefillEstimate) -> tuple[float, float]:
    return costs.full_pass_s(asked.prompt_tokens, asked.held_tokens), costs.fused_s(asked)


def off_by(learned: LearnedCosts, true: Costs) -> float:
    """Return the largest factor by which predictions are off."""
    found = learned()
    assert found is not None
    ratios = [
        mine / its
        for asked in PROMPTS
        for mine, its in zip(full_and_fused_s(found, asked), full_and_fused_s(true, asked), strict=True)
    ]
    return max(max(ratio, 1 / ratio) for ratio in ratios)


class InAFolder(MemoryStore):
    """A store in memory that keeps files in a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder


def learning(lm: LanguageModel, folder: Path | str | None = None) -> LearnedCosts:
    return LearnedCosts(lm, MemoryStore() if folder is None else InAFolder(Path(folder)), PrefillRunner(lm))


# --- from passes to costs


def test_nothing_is_predicted_before_a_pass_was_run(llama: LanguageModel) -> None:
    assert learning(llama)() is None


def test_passes_of_three_sizes_give_the_costs_of_passes_rows_and_keys(llama: LanguageModel) -> None:
    learned = learning(llama)
    for rows, keys in ((1, 500), (400, 6000), (4000, 500)):
        learned.observe_pass(rows, keys, CPU.partial_pass_s(rows, keys))
    found = learned()
    assert found is not None
    assert found.pass_s == pytest.approx(CPU.pass_s, rel=0.02)
    assert (found.row_s, found.key_s) == (pytest.approx(CPU.row_s, rel=0.05), pytest.approx(CPU.key_s, rel=0.05))


def test_one_pass_gives_costs_in_the_usual_proportions(llama: LanguageModel) -> None:
    learned = learning(llama)
    learned.observe_pass(100, 0, 1.2)
    found = learned()
    assert found is not None
    assert found.pass_s == pytest.approx(40 * found.row_s)
    assert found.pass_s + 100 * found.row_s == pytest.approx(1.2)
    assert found.key_s > 0


def test_a_token_before_the_rows_costs_something_where_layers_are_recurrent(
    llama: LanguageModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    scanning = replace(CPU, key_s=0.0, scan_s=5e-4)
    for lm in (LanguageModel.wrap(build_model("qwen3.5-gated-delta"), tokenizer), llama):
        learned = learning(lm)
        for rows, length in ((1, 1), (50, 1000), (300, 1000), (1000, 1000)):
            learned.observe_pass(rows, 0, scanning.partial_pass_s(rows, 0, length=length), length - rows)
        found = learned()
        assert found is not None
        assert found.scan_s == (pytest.approx(5e-4, rel=0.1) if lm.recurrent else 0.0)


def test_passes_that_took_much_too_long_change_little(llama: LanguageModel) -> None:
    machine = Machine(CPU)
    learned = learning(llama)
    for asked in PROMPTS * 2:
        machine.ask(learned, asked)
    assert off_by(learned, CPU) < 1.4
    for rows in (60, 300, 2000):
        learned.observe_pass(rows, 1000, 100.0)
    assert off_by(learned, CPU) < 1.4


def test_loading_is_priced_by_the_tier_that_it_came_from(llama: LanguageModel) -> None:
    learned, near, far = learning(llama), prompt(4), prompt(4, near=False)

    def load(asked: PrefillEstimate, load_s: float) -> Costs:
        probe_s, recompute_s = (0.01 * rows for rows in (asked.probe_rows, asked.rows))
        learned.observe_prefill(asked, load_s=load_s, probe_s=probe_s, recompute_s=recompute_s)
        found = learned()
        assert found is not None
        return found

    found = load(far, 2.0)
    assert (found.load_s, found.near_load_s) == (pytest.approx(2.0 / far.stored_tokens, rel=0.1), None)
    found = load(near, 0.1)
    assert found.near_load_s == pytest.approx(0.1 / near.stored_tokens, rel=0.1)
    half = replace(far, near_tokens=far.stored_tokens // 2)
    found = [load(half, 0.55) for _ in range(4)][-1]
    assert found.load_s == pytest.approx(1.0 / far.stored_tokens, rel=0.1)


def test_a_pass_in_parts_is_several_passes(llama: LanguageModel) -> None:
    at_once, in_parts = learning(llama), learning(llama)
    for learned, parts in ((at_once, 1), (in_parts, 4)):
        learned.observe_pass(1, 0, 0.05)
        learned.observe_prefill(
            PrefillEstimate(4000, 0, 0, 0, 1.0), load_s=0.0, probe_s=0.0, recompute_s=parts * 0.05 + 8.0, parts=parts
        )
    first, second = at_once(), in_parts()
    assert first is not None
    assert second is not None
    assert first.row_s == pytest.approx(second.row_s, rel=0.05)


# --- a busy machine


def test_predictions_follow_a_machine_that_becomes_busy_and_quiet_again(llama: LanguageModel) -> None:
    """Other work slows both ways down alike, so the guard decides as before."""
    learned, quiet = learning(llama), Machine(CPU)
    for asked in PROMPTS * 3:
        quiet.ask(learned, asked)
    decided = [BreakEven().refusal(asked, learned() or CPU) is None for asked in PROMPTS]
    for pace in (2.0, 1.0):
        machine = Machine(CPU.at_pace(pace))
        errors = [machine.ask(learned, asked) or 0.0 for asked in PROMPTS * 4]
        assert sum(1 / 1.5 < error < 1.5 for error in errors[3:]) >= 0.8 * len(errors[3:])
        assert [BreakEven().refusal(asked, learned() or CPU) is None for asked in PROMPTS] == decided


# --- a file


def test_what_was_learned_outlives_a_restart(llama: LanguageModel, tmp_path: Path) -> None:
    first, machine = learning(llama, tmp_path), Machine(CPU)
    for asked in PROMPTS:
        machine.ask(first, asked)
    first.save()
    [file] = tmp_path.glob("costs-*.json")
    second, found = learning(llama, tmp_path)(), first()
    assert second is not None
    assert found is not None
    assert second.row_s == pytest.approx(found.row_s, rel=0.3)
    assert second.near_load_s == pytest.approx(found.near_load_s, rel=0.3)
    kept = read_samples(file)
    assert {sample.kind for sample in kept.values()} == {"pass", "near"}
    assert all(sample.count >= 1 for sample in kept.values())


def test_the_file_is_written_when_something_has_changed(llama: LanguageModel, tmp_path: Path) -> None:
    learned = learning(llama, tmp_path)
    learned.observe_pass(100, 100, 1.0)
    learned.save()
    [file] = tmp_path.glob("costs-*.json")
    file.unlink()
    learned.observe_pass(100, 100, 0.99)
    learned.save()
    assert not file.exists()
    learned.observe_pass(100, 100, 0.5)
    learned.save()
    assert file.exists()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "[[]]",
        '{"pass_s": 2.495, "row_s": 0.1}',
        '[{"kind": "pass", "seconds": 1e999}]',
        '[{"kind": "pass", "seconds": "a"}]',
        '[{"kind": "pass", "seconds": 1.0, "rows": null}]',
        "7",
    ],
)
def test_a_damaged_file_and_one_of_an_earlier_version_tell_nothing(
    content: str, llama: LanguageModel, tmp_path: Path
) -> None:
    path = costs_path(llama, InAFolder(tmp_path))
    assert path is not None
    path.write_text(content)
    learned = learning(llama, tmp_path)
    assert learned() is None
    learned.observe_pass(100, 100, 1.0)
    learned.save()
    assert read_samples(path)


def test_a_folder_that_cannot_be_written_costs_nothing(llama: LanguageModel, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    learned = learning(llama, tmp_path / "file")
    learned.observe_pass(100, 100, 1.0)
    learned.save()
    assert learned() is not None


def test_an_old_sample_counts_less_than_a_new_one(llama: LanguageModel, tmp_path: Path) -> None:
    found = []
    for age in (0.0, 3 * HALF_LIFE_S):
        path = costs_path(llama, InAFolder(tmp_path))
        assert path is not None
        old = Sample("pass", 2 * CPU.partial_pass_s(3000, 0), 3000, count=8, at=time.time() - age)
        path.write_text(json.dumps([asdict(old), asdict(Sample("pass", CPU.pass_s, 1, count=8, at=time.time()))]))
        learned = learning(llama, tmp_path)
        for _ in range(8):
            learned.observe_pass(1500, 0, CPU.partial_pass_s(1500, 0))
        costs = learned()
        assert costs is not None
        found.append(costs.row_s)
    assert found[0] > found[1] > CPU.row_s


def test_costs_of_other_kernels_attention_tiers_and_formats_are_kept_apart(
    llama: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskStore(tmp_path) as disk, TieredStore(MemoryStore(), DiskStore(tmp_path)) as tiered:
        paths = {costs_path(llama, store) for store in (disk, tiered)}
        monkeypatch.setattr("qcfuse_rag.runtime.learned_costs.kernels_available", lambda *_: True)
        paths.add(costs_path(llama, disk))
        monkeypatch.setattr("qcfuse_rag.runtime.learned_costs.dense_attention_name", lambda *_: "flash-attn")
        paths.add(costs_path(llama, disk))
    with DiskStore(tmp_path, kv_dtype="int8") as rounded:
        paths.add(costs_path(llama, rounded))
    assert len(paths) == 5


# --- a wrong price


def planted(lm: LanguageModel, folder: Path, wrong: Callable[[int, Sample], float]) -> LearnedCosts:
    """Return the costs of a process that finds the file of an earlier one, with some samples times a factor."""
    machine, earlier = Machine(CPU), learning(lm, folder)
    for asked in [*PROMPTS, prompt(6, near=False)]:
        machine.ask(earlier, asked)
    earlier.observe_pass(2048, 400, CPU.partial_pass_s(2048, 400))  # a batch
    earlier.save()
    [file] = folder.glob("costs-*.json")
    samples = [
        replace(sample, seconds=sample.seconds * wrong(index, sample))
        for index, sample in enumerate(read_samples(file).values())
    ]
    file.write_text(json.dumps([asdict(sample) for sample in samples]))
    return learning(lm, folder)


KINDS: dict[str, Callable[[int, Sample], bool]] = {
    "all": lambda _, sample: True,
    "passes": lambda _, sample: sample.kind == "pass",
    "short passes": lambda _, sample: sample.kind == "pass" and sample.rows < 10,
    "long passes": lambda _, sample: sample.kind == "pass" and sample.rows > 100,
    "loads": lambda _, sample: sample.kind != "pass",
    "loads from memory": lambda _, sample: sample.kind == "near",
}


@pytest.mark.parametrize("factor", [20.0, 1 / 20], ids=["high", "low"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_wrong_samples_is_corrected_within_five_questions(
    kind: str, factor: float, llama: LanguageModel, tmp_path: Path
) -> None:
    learned = planted(llama, tmp_path, lambda index, sample: factor if KINDS[kind](index, sample) else 1.0)
    machine = Machine(CPU, random.Random(1))
    for asked in PROMPTS:
        machine.ask(learned, asked)
    assert off_by(learned, CPU) < 1.5


@settings(max_examples=60, deadline=None)
@given(
    wrong=st.integers(0, 20),
    factor=st.sampled_from([20.0, 1 / 20]),
    seed=st.integers(0, 10**6),
    order=st.permutations(PROMPTS),
)
def test_any_one_wrong_sample_is_corrected_within_five_questions(
    wrong: int, factor: float, seed: int, order: Sequence[PrefillEstimate], llama: LanguageModel
) -> None:
    with TemporaryDirectory() as folder:
        learned = planted(llama, Path(folder), lambda index, _: factor if index == wrong else 1.0)
    machine = Machine(CPU, random.Random(seed))
    for asked in order:
        machine.ask(learned, asked)
    assert off_by(learned, CPU) < 3.0, "of 20, in the worst noise that is found"


@pytest.mark.parametrize("questions", [5, 40])
def test_a_slow_store_is_tried_again_ever_more_rarely(questions: int, llama: LanguageModel) -> None:
    slow = replace(CPU, load_s=1.0, near_load_s=1.0)
    learned, machine = learning(llama), Machine(slow)
    fused = 0
    for _ in range(questions):
        before = learned.refusals
        machine.ask(learned, prompt(6))
        fused += learned.refusals == before or (learned.refusals > 1 and math.log2(learned.refusals).is_integer())
    assert fused == {5: 3, 40: 6}[questions], "the first one, when nothing was known, and the 2nd, 4th, 8th ... refusal"


# --- on a GPU


@pytest.fixture
def on_a_gpu(llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learn as on a GPU, of a model as wide as Qwen3-8B."""
    monkeypatch.setattr(llama.model, "get_input_embeddings", lambda: torch.nn.Embedding(2, 4096))
    monkeypatch.setattr("qcfuse_rag.runtime.learned_costs.overlaps", lambda _: True)


def timed(learned: LearnedCosts, seconds: Callable[[int], float], sizes: Sequence[int] = (16, 4096, 8192)) -> Costs:
    """Return the costs after the passes that an engine times on a GPU."""
    for size in sizes:
        learned.observe_pass(size, size / 2, seconds(size))
    found = learned()
    assert found is not None
    return found


@pytest.mark.usefixtures("on_a_gpu")
def test_on_a_gpu_two_long_passes_give_the_cost_of_a_key(llama: LanguageModel) -> None:
    costs = timed(learning(llama), lambda rows: max(0.05, 2e-5 * rows + 1e-9 * rows**2))
    assert (costs.pass_s, costs.overlaps) == (0.05, True)
    assert (costs.row_s, costs.key_s) == (pytest.approx(2e-5, rel=0.02), pytest.approx(2e-9, rel=0.05))
    costs = timed(learning(llama), lambda rows: max(0.05, 2e-5 * rows - 1e-9 * rows**2))
    assert costs.key_s == 0, "a disturbed measurement does not make long prompts free"


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(("launch_s", "row_s"), [(0.1, 2e-4), (0.7, 1e-4), (0.9, 1e-4)])
def test_a_pass_that_waits_for_the_host_tells_nothing_of_rows(
    launch_s: float, row_s: float, llama: LanguageModel
) -> None:
    costs = timed(learning(llama), lambda rows: max(launch_s, row_s * rows))
    for rows in (16, 4096, 8192):
        assert costs.partial_pass_s(rows, rows / 2) == pytest.approx(max(launch_s, row_s * rows), rel=0.02)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(("load_s", "found_s"), [(0.04, 0.06), (0.001, 0.001)], ids=["waited for", "hidden"])
def test_on_a_gpu_loading_goes_on_behind_a_probe(load_s: float, found_s: float, llama: LanguageModel) -> None:
    learned = learning(llama)
    costs = timed(learned, lambda rows: max(0.02, 2e-5 * rows))
    asked = prompt(20)
    learned.observe_prefill(asked, load_s=load_s, probe_s=0.02, recompute_s=costs.partial_pass_s(asked.rows))
    found = learned()
    assert found is not None
    assert found.near_load_s == pytest.approx(found_s / asked.stored_tokens, rel=0.1)


LAUNCHED, RECORDED = 0.055, 0.0165
H200 = {
    # Prompt tokens: seconds of full prefill as predicted and as measured, of fusing from each tier as predicted.
    4160: (0.108, 0.113, {"device": 0.034, "int8": 0.035, "bfloat16": 0.039}),
    10304: (0.328, 0.327, {"device": 0.043, "int8": 0.056, "bfloat16": 0.066}),
    32832: (1.751, 1.671, {"device": 0.115, "int8": 0.160, "bfloat16": 0.190}),
}
"""Predicted for Qwen3-8B's shape on an H200 by the costs of two timed passes: benchmarks/results/gpu.md."""
TIERS = {"device": 5e-7, "int8": 3e-6, "bfloat16": 3.9e-6, "files": 8e-5}
"""Seconds of loading a token: from page-locked memory at 55 GB a second, from a file as measured."""


@pytest.mark.usefixtures("on_a_gpu")
def test_the_decisions_on_an_h200_are_those_of_the_measured_tables(llama: LanguageModel) -> None:
    row_s, key_s = 2.2e-5, 1.91e-9
    costs = timed(learning(llama), lambda rows: max(LAUNCHED, rows * (row_s + key_s * rows / 2)))
    costs = replace(costs, recorded_pass_s=RECORDED, recorded_rows=1024)
    for tokens, (full_s, measured_s, fused_s) in H200.items():
        assert costs.full_pass_s(tokens) == pytest.approx(full_s, rel=0.04)
        assert costs.full_pass_s(tokens) == pytest.approx(measured_s, rel=0.08)
        stored = tokens - 32
        asked = PrefillEstimate(tokens, stored, int(0.05 * (stored - 544)), 32, 1.0, near_tokens=stored)
        for tier, seconds in fused_s.items():
            priced = replace(costs, load_s=TIERS[tier], near_load_s=TIERS[tier])
            assert priced.fused_s(asked) == pytest.approx(seconds, rel=0.35)
            assert BreakEven().refusal(asked, priced) is None
        files = replace(costs, load_s=TIERS["files"], near_load_s=TIERS["int8"])
        assert BreakEven().refusal(replace(asked, near_tokens=0), files) is not None
        assert BreakEven().refusal(asked, files) is None, "once they were copied"
