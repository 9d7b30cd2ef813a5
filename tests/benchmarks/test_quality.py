"""The measurement `quality`, end to end on a tiny model: same tokens for all, nothing lost, nothing mixed."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.configurations import NO_PASSAGES, configurations
from benchmarks.preparation import prepare
from benchmarks.quality import MEANS, PendingQuestion, answer, gold_nll, report
from benchmarks.questions import Example
from benchmarks.runner import Run as Records
from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, SamplingParams, make_method
from tests.support.cli import Run
from tests.support.engines import make_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES, QUESTION

RECORDS = [
    {
        "id": f"q{i}",
        "question": QUESTION,
        "answers": ["the harbour school", "school"],
        "passages": [{"title": f"Page {j}", "text": PASSAGES[(i + j) % 3]} for j in range(3)],
        "supporting": [1],
    }
    for i in range(3)
]
FULL = make_method("full")


class Bench:
    """Runs the command on a small dataset and returns its result."""

    def __init__(self, run: Run, model: str, folder: Path) -> None:
        self.run, self.model, self.data, self.out = run, model, folder / "data", folder / "results" / "r.json"
        self.data.mkdir()
        self.write("harbour", RECORDS)

    def write(self, name: str, records: list[dict[str, Any]]) -> None:
        (self.data / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    def arguments(self, *options: object, dataset: str = "harbour") -> list[object]:
        where = ("--model", self.model, "--device", "cpu", "--data-dir", self.data, "--dataset", dataset)
        return ["quality", *where, "--json", self.out, "--max-new-tokens", 4, *options]

    def __call__(self, *options: object, dataset: str = "harbour") -> dict[str, Any]:
        self.printed = self.run.text(*self.arguments(*options, dataset=dataset))
        found: dict[str, Any] = json.loads(self.out.read_text())
        return found

    def fails(self, *options: object, dataset: str = "harbour") -> str:
        code, _, err = self.run(*self.arguments(*options, dataset=dataset))
        assert code == 1
        return " ".join(err.split())


@pytest.fixture
def bench(run: Run, model_folder: str, tmp_path: Path) -> Bench:
    return Bench(run, model_folder, tmp_path)


def answers_of(found: dict[str, Any], method: str | None = None) -> list[dict[str, Any]]:
    """Return the records of answers, each with its question and method in its key."""
    return [r for r in found["records"] if r["key"][0] == "answer" and method in (None, r["key"][3])]


@pytest.mark.slow
def test_every_answer_is_that_of_the_users_own_path(tokenizer: Any) -> None:
    lm = LanguageModel.wrap(build_model("gemma2-softcap"), tokenizer, name="gemma2")
    engine = make_engine(lm, MemoryStore())
    full, *methods = configurations(["reuse", "random", "qcfuse"], [0.2, 0.6], ["blind", "framed"])
    chosen = [full, NO_PASSAGES, *methods]
    prepare(engine, chosen, PASSAGES)
    prompt, without_passages = engine.prompt(QUESTION, PASSAGES), engine.prompt(QUESTION)
    example = Example(QUESTION, tuple(PASSAGES), ("school",), id="0", dataset="d", max_new_tokens=8)
    question, records, exact_answer = PendingQuestion(example, prompt, without_passages, (40, 50, 60)), [], None
    for configuration in chosen:
        record, exact_answer = answer(engine, question, configuration, exact_answer)
        records.append(record)
    exact = engine.generate(prompt, SamplingParams(max_new_tokens=8), method=FULL)
    for configuration, record in zip(chosen, records, strict=True):
        seen = without_passages if configuration is NO_PASSAGES else prompt
        alone = engine.generate(seen, SamplingParams(max_new_tokens=8), method=configuration.method)
        assert record["answer"] == alone.text.strip(), configuration.key
        assert record["identical"] == (alone.ids == exact.ids)
        assert record["length_ratio"] == len(alone.ids) / len(exact.ids)
        assert record["answer_kl"] == pytest.approx(statistics.fmean(record["position_kl"]), rel=1e-3)
        assert record["kl"] == pytest.approx(record["position_kl"][0], rel=1e-3)
        assert (record["rows"] < len(prompt)) == (configuration is not full)
    assert [record["identical"] for record in records[:2]] == [True, False]
    assert len({record["answer"] for record in records}) > 2, "methods that all say the same would prove nothing"


def test_the_likelihood_of_the_gold_answer_is_the_models_own(engine: FusionEngine) -> None:
    prompt, gold = engine.prompt(QUESTION, PASSAGES), tuple(range(30, 60))
    full = engine.prefill(prompt, method=FULL, answer_tokens=len(gold))
    with torch.inference_mode():
        logits = engine.lm.model(torch.tensor([[*prompt.ids, *gold]])).logits[0, len(prompt) - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(gold))
    assert gold_nll(engine.runner, full, gold) == pytest.approx(float(expected), abs=1e-4)
    assert gold_nll(engine.runner, full, ()) == 0


def test_a_run_goes_on_and_adds_what_is_missing(bench: Bench) -> None:
    first = answers_of(bench("--methods", "reuse,random", "--ratios", ".5", "--size", 2))
    assert {tuple(r["key"][2:6]) for r in first if r["key"][2] == "q0"} == {
        ("q0", "full", None, 1.0),
        ("q0", "no passages", None, None),
        ("q0", "reuse", "framed", 0.0),
        ("q0", "random", "framed", 0.5),
    }
    assert all({*MEANS, "position_kl", "ttft_s", "full_ttft_s", "answer"} <= r.keys() for r in first)
    partial = bench.out.parent / "r.partial.jsonl"
    lines = partial.read_bytes().splitlines(keepends=True)
    partial.write_bytes(b"".join(lines[:-2]))
    left, lost = first[:-2], first[-2:]
    shown = bench.run.json("show", partial)
    assert answers_of(shown) == left, "a table comes from what there is"
    more = answers_of(bench("--methods", "reuse,random", "--ratios", ".5", "--size", 3))
    assert more[: len(left)] == left, "not even a time was taken anew"
    assert sorted(r["key"][2:4] for r in more[len(left) :]) == sorted(
        [*(r["key"][2:4] for r in lost), *(["q2", method] for method in ("full", "no passages", "reuse", "random"))]
    )


def test_a_table_has_a_line_for_each_dataset_and_configuration(bench: Bench, tmp_path: Path) -> None:
    bench.write("other", RECORDS[:1])
    options = ("--methods", "qcfuse,random", "--ratios", ".5", "--store", tmp_path / "kv")
    found = bench(*options, dataset="harbour,other")
    lines = {(line["dataset"], line["method"]): line for line in found["summary"]}
    sides = ("full", "no passages", "qcfuse", "random")
    assert list(lines) == [(dataset, method) for dataset in ("harbour", "other", "all") for method in sides]
    assert lines["all", "qcfuse"]["n"] == 4
    full, _, qcfuse, random = (lines["harbour", method] for method in sides)
    assert (full["n"], lines["other", "full"]["n"]) == (3, 1)
    assert qcfuse["minus_full"]["nll"]["mean"] == pytest.approx(qcfuse["nll"] - full["nll"])
    assert qcfuse["minus_random"]["answer_kl"]["mean"] == pytest.approx(qcfuse["answer_kl"] - random["answer_kl"])
    assert qcfuse["intervals"]["answer_kl"]["low"] <= qcfuse["answer_kl"] <= qcfuse["intervals"]["answer_kl"]["high"]
    assert (qcfuse["offline_bytes_per_chunk"] > 0, full["offline_chunks"]) == (True, 0)
    assert "harbour: 3 questions" in bench.printed
    assert "| qcfuse | blind | 0.5 | 3 |" in (bench.out.parent / "r.md").read_text()
    assert any((tmp_path / "kv").iterdir())


def test_a_question_too_long_for_the_model_is_named_and_left_out(bench: Bench) -> None:
    bench.write("long", [RECORDS[0], {**RECORDS[1], "passages": [PASSAGES[0] * 60], "supporting": []}])
    found = bench("--methods", "full", "--distractors", 0, dataset="long")
    assert {r["key"][2] for r in answers_of(found)} == {"q0"}
    assert "1 questions do not say which passages" in found["notes"][0]
    assert "long q1: its prompt exceeds 2,048 tokens" in found["notes"][1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--methods", "nothing"), "no method 'nothing'"),
        (("--json", "r.md"), "call it something.json, not r.md"),
        (("--dataset", "ruler_vt", "--top-k", "3"), "--top-k would cut away part of what ruler_vt hides"),
        (("--dataset", "squad"), "no dataset 'squad' in"),
    ],
)
def test_mistakes_are_named(bench: Bench, options: tuple[str, ...], says: str) -> None:
    assert says in bench.fails(*options)


def record(f1: float, **more: object) -> dict[str, Any]:
    zeros = dict.fromkeys((*MEANS, "probe_s", "select_s"), 0.0)
    return {**zeros, "f1": f1, "ttft_s": 1.0, "full_ttft_s": 2.0, "fallback": None, "preparation": None, **more}


def summary(*records: tuple[str, str, dict[str, Any]], dataset: str = "d") -> dict[str, dict[str, Any]]:
    """Return the lines of records `(method, question, record)` by method."""
    run = Records("quality")
    sides = {"full": (None, 1.0), "no passages": (None, None)}
    for method, name, values in records:
        run.add(("answer", dataset, name, method, *sides.get(method, ("blind", 0.1)), None), values)
    return {line["method"]: line for line in report(run).summary["summary"]}


def test_differences_are_paired_by_question() -> None:
    lines = summary(
        *(("full", str(i), record(i / 10)) for i in range(10)),
        *(("qcfuse", str(i), record(i / 10 - 0.1)) for i in reversed(range(5))),
        *(("random[seed=3]", str(i), record(0.0, answer_kl=1.0)) for i in range(5)),
    )
    interval = lines["qcfuse"]["minus_full"]["f1"]
    assert [round(interval[name], 9) for name in ("mean", "low", "high")] == [-0.1] * 3
    assert lines["qcfuse"]["minus_random"]["answer_kl"]["mean"] == -1, "random is a control with any parameters"
    assert lines["random[seed=3]"]["minus_random"]["f1"] is lines["full"]["minus_random"]["f1"] is None
    assert (lines["qcfuse"]["ttft_to_full"], lines["full"]["zero_share"]) == (0.5, 0.1)


def test_what_a_method_recovers_is_its_share_of_full_prefills_gain() -> None:
    records = [("full", str(i), record(0.8, match=0.5)) for i in range(4)]
    records += [("no passages", str(i), record(0.4, match=0.5)) for i in range(4)]
    records += [("qcfuse", str(i), record(f1, match=0.5)) for i, f1 in enumerate((0.8, 0.7, 0.6, 0.3))]
    recovered = summary(*records)["qcfuse"]["recovered"]
    assert recovered["mean"] == pytest.approx((0.6 - 0.4) / (0.8 - 0.4))
    assert -0.25 <= recovered["low"] < recovered["mean"] < recovered["high"] <= 1
    ruler = summary(*records, dataset="ruler_mv")["qcfuse"]["recovered"]
    assert ruler["mean"] is None, "by match, full prefill finds no more than without passages"


def test_answers_that_a_guard_had_computed_in_full_are_told() -> None:
    run = Records("quality")
    for number, fallback in enumerate(("1 of 3 passages computed in full: absent", "computed in full, nothing saved")):
        run.add(("answer", "d", str(number), "auto", "primed", 0.1, None), record(0.0, fallback=fallback))
        run.add(("answer", "d", str(number), "epic", "blind", 0.1, None), record(0.0, answer_kl=0.3))
    found = report(run)
    assert any(note.startswith("auto: 1 of 2 answers were computed in full") for note in found.notes)
    assert [line["auto_minus_it"]["mean"] for line in found.summary["summary"]] == [0.0, pytest.approx(-0.3)]
