"""`python -m benchmarks quality`, end to end on a tiny model: same tokens for all, nothing lost, nothing mixed."""

from __future__ import annotations

import io
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.quality.configurations import NO_PASSAGES, configurations
from benchmarks.quality.measure import on_methods
from benchmarks.quality.offline import prepare
from benchmarks.quality.run import PendingQuestion, answer, gold_nll
from benchmarks.quality.tables import terminal_tables
from benchmarks.samples import Example
from benchmarks.studies.compare import compare
from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, SamplingParams, make_method
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.generation.completion import end_tokens
from qcfuse_rag.store.prefill_base import BASES
from qcfuse_rag.verification.divergence import answer_text
from tests.support import seams
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
KEYS = (
    "id dataset method base ratio rows context_tokens f1 em rouge_l match nll kl answer_kl top1 identical length_ratio "
    "position_kl ttft_s answer probe_s select_s load_s recompute_s bytes_loaded"
)


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
def drawing_bench(run: Run, model_folder: str, tmp_path: Path) -> Bench:
    return Bench(run, model_folder, tmp_path)


@pytest.fixture
def bench(drawing_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Return the command without its pictures, which take as long as the rest."""
    seams.quality_plots(monkeypatch, lambda *_: [])
    return drawing_bench


@pytest.mark.slow
def test_every_answer_is_that_of_the_users_own_path(tokenizer: Any) -> None:
    lm = LanguageModel.wrap(build_model("gemma2-softcap"), tokenizer, name="gemma2")
    engine = make_engine(lm, MemoryStore())
    full, *methods = configurations(["reuse", "random", "qcfuse"], [0.2, 0.6], ["blind", "framed"])
    chosen = [full, NO_PASSAGES, *methods]
    prepare(engine, chosen, PASSAGES)
    prompt, without_passages = engine.prompt(QUESTION, PASSAGES), engine.prompt(QUESTION)
    example = Example(QUESTION, tuple(PASSAGES), ("school",), id="0", dataset="d", max_new_tokens=8)
    records = list(answer(engine, PendingQuestion(example, prompt, without_passages, (40, 50, 60), ""), chosen))
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


def test_the_text_of_an_answer_ends_before_its_end_token(engine: FusionEngine) -> None:
    end = min(end_tokens(engine.lm))
    assert answer_text(engine.lm, (end,)) == ""
    school = engine.lm.tokenizer.backend_tokenizer.encode(" the school", add_special_tokens=False).ids
    assert answer_text(engine.lm, (*school, end)) == "the school"


def test_every_question_has_a_record_of_every_configuration(bench: Bench) -> None:
    found = bench("--methods", "qcfuse,reuse,random", "--ratios", ".1,.5", "--size", 2)
    of_one = [(r["method"], r["base"], r["ratio"]) for r in found["records"] if r["id"] == "q0"]
    assert sorted(of_one, key=str) == sorted(
        [
            ("full", None, 1.0),
            ("no passages", None, None),
            ("reuse", "framed", 0.0),
            *(("qcfuse", "blind", ratio) for ratio in (0.1, 0.5)),
            *(("random", "blind", ratio) for ratio in (0.1, 0.5)),
        ],
        key=str,
    )
    assert {r["id"] for r in found["records"]} == {"q0", "q1"}
    assert all(set(KEYS.split()) <= set(r) and r["fallback"] is None for r in found["records"])
    full = [r for r in found["records"] if r["method"] == "full"]
    assert all(r["kl"] == r["answer_kl"] == 0 and r["full_ttft_s"] == r["ttft_s"] for r in full)
    for name in ("q0", "q1"):
        read = {r["method"]: r["context_tokens"] for r in found["records"] if r["id"] == name}
        assert read.pop("no passages") == 0
        assert len(set(read.values())) == 1
    assert found["about"]["options"]["size"] == 2
    assert found["about"]["command"].startswith("python -m benchmarks quality")


@pytest.mark.slow
def test_the_summary_has_a_line_for_each_configuration(bench: Bench) -> None:
    found = bench("--methods", "qcfuse,random", "--ratios", ".5")
    lines = {line["method"]: line for line in found["summary"]}
    assert list(lines) == ["full", "no passages", "qcfuse", "random"]
    qcfuse, full = lines["qcfuse"], lines["full"]
    assert qcfuse["n"] == 3
    assert qcfuse["minus_full"]["nll"]["mean"] == pytest.approx(qcfuse["nll"] - full["nll"])
    to_random = qcfuse["minus_random"]["answer_kl"]["mean"]
    assert to_random == pytest.approx(qcfuse["answer_kl"] - lines["random"]["answer_kl"])
    for name in ("answer_kl", "identical", "top1", "kl"):
        assert qcfuse["intervals"][name]["low"] <= qcfuse[name] <= qcfuse["intervals"][name]["high"]
    assert qcfuse["offline_s_per_chunk"] > 0
    assert qcfuse["offline_bytes_per_chunk"] > 0
    assert full["offline_bytes"] == 0
    assert lines["random"]["minus_random"] is None


@pytest.mark.slow
def test_table_plots_and_markdown_are_made(drawing_bench: Bench, tmp_path: Path) -> None:
    bench = drawing_bench
    bench("--methods", "qcfuse", "--ratios", ".2,.5", "--size", 2, "--plots", tmp_path / "plots")
    assert "harbour: 2 questions" in bench.printed
    assert "| qcfuse | blind | 0.2 |" in (bench.out.parent / "r.md").read_text()
    drawn = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert drawn == ["r.harbour.f1-ratio.png", "r.harbour.f1-ttft.png"]
    assert all((tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG") for name in drawn)


def test_a_methods_parameters_are_shown_as_they_were_written(bench: Bench) -> None:
    """In the terminal as well, where what stands in brackets may be taken for a colour."""
    summary = bench("--methods", "auto[rows=question]", "--ratios", ".2", "--size", 1)["summary"]
    shown = {}
    for width in (200, 80):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(*terminal_tables(summary, width))
        shown[width] = console.export_text()
    assert "│ auto[rows=question] │" in shown[200]
    assert "…" not in shown[80]
    assert "| auto[rows=question] | primed | 0.2 |" in (bench.out.parent / "r.md").read_text()


@pytest.mark.slow
def test_results_are_pooled_and_compared_by_answers(bench: Bench, tmp_path: Path) -> None:
    records = bench("--methods", "reuse,random", "--ratios", "0", "--size", 2)["records"]
    found = compare([bench.out], "reuse", tmp_path / "plot.png")
    lines = {line["method"]: line for line in found.data["configurations"]}
    for name in ("identical", "answer_kl"):
        means = {m: statistics.fmean(r[name] for r in records if r["method"] == m) for m in ("reuse", "random")}
        assert lines["reuse"][name] == pytest.approx(means["reuse"])
        [difference] = found.data["differences"]
        assert difference[name]["mean"] == pytest.approx(means["reuse"] - means["random"])
    assert any("| `no passages` | - | - |" in str(part) for part in found.shown)
    assert (tmp_path / "plot.png").exists()


def test_results_without_answers_are_refused(bench: Bench) -> None:
    result = bench("--methods", "reuse", "--size", 1)
    for record in result["records"]:
        del record["answer_kl"]
    bench.out.write_text(json.dumps(result))
    with pytest.raises(QCFuseError, match="compares first tokens only"):
        compare([bench.out])


@pytest.mark.slow
def test_running_again_adds_only_what_is_missing(bench: Bench) -> None:
    first = bench("--methods", "reuse", "--size", 2)
    again = bench("--methods", "reuse", "--size", 2)
    assert again["records"] == first["records"], "not even a time was taken anew"
    more = bench("--methods", "reuse,random", "--size", 3)
    assert more["records"][: len(first["records"])] == first["records"]
    added = more["records"][len(first["records"]) :]
    assert [(r["id"], r["method"]) for r in added if r["id"] != "q2"] == [("q0", "random"), ("q1", "random")]
    assert {r["method"] for r in added if r["id"] == "q2"} == {"full", "no passages", "reuse", "random"}


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_where_it_was(bench: Bench) -> None:
    whole = bench("--methods", "reuse,random")
    partial = bench.out.parent / "r.partial.jsonl"
    lines = partial.read_bytes().splitlines(keepends=True)
    partial.write_bytes(b"".join(lines[:5]) + lines[5][:20])
    again = bench("--methods", "reuse,random")

    def what(found: dict[str, Any]) -> list[Any]:
        return sorted((r["id"], r["method"], r["answer"], r["rows"]) for r in found["records"])

    assert what(again) == what(whole)


@pytest.mark.slow
def test_a_damaged_line_costs_its_own_record_only(bench: Bench) -> None:
    whole = bench("--methods", "reuse,random")
    partial = bench.out.parent / "r.partial.jsonl"
    lines = partial.read_bytes().splitlines(keepends=True)
    assert b'"record"' in lines[3]
    partial.write_bytes(b"".join([*lines[:3], lines[3][:20] + b"\n", *lines[4:]]))
    again = bench("--methods", "reuse,random")
    kept = [record for record in whole["records"] if record in again["records"]]
    assert len(kept) == len(whole["records"]) - 1 == len(again["records"]) - 1
    assert "r.partial.jsonl: damaged and left out: line 4" in " ".join(again["about"]["notes"])
    assert partial.read_bytes().startswith(b"".join(lines[:3])), "what is there is not written over"


@pytest.fixture
def neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take all others for neighbours, so that caches depend on every passage of their group."""

    def others(passages: Sequence[str], count: int = 10) -> list[list[int]]:
        return [[j for j in reversed(range(len(passages))) if j != i] for i in range(len(passages))]

    seams.nearest_passages(monkeypatch, others)


def likelihoods(found: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {(r["id"], r["method"]): pytest.approx(r["nll"], abs=1e-6) for r in found["records"]}


@pytest.mark.slow
@pytest.mark.usefixtures("neighbours")
def test_records_of_caches_made_beside_other_passages_are_made_anew(bench: Bench) -> None:
    options = ("--methods", "fusionrag,cachecraft,reuse", "--ratios", 0.2)
    few = bench(*options, "--size", 2)
    more = bench(*options, "--size", 3)
    assert "4 records of enriched or captured passages were made anew" in bench.printed
    assert [r for r in few["records"] if r in more["records"]] == [
        r for r in few["records"] if r["method"] in ("full", "no passages", "reuse")
    ]
    again = bench(*options, "--size", 3)
    assert likelihoods(again) == likelihoods(more)
    assert again["about"]["notes"] == []
    bench.out = bench.out.with_name("at-once.json")
    assert likelihoods(bench(*options, "--size", 3)) == likelihoods(more) != likelihoods(few)


@pytest.mark.slow
def test_what_relaycaching_is_measured_without_is_said(bench: Bench) -> None:
    assert "a model generated" not in str(bench("--methods", "reuse", "--size", 1)["about"]["notes"])
    bench("--methods", "relaycaching", "--size", 1)
    says = "relaycaching: it is made for passages that a model generated"
    assert says in bench.printed
    assert says in (bench.out.parent / "r.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("change", [("--distractors", 0), ("--seed", 1), ("--max-new-tokens", 5)])
def test_records_of_other_conditions_are_not_mixed(bench: Bench, change: tuple[str, int]) -> None:
    bench("--methods", "reuse", "--size", 1)
    error = bench.fails("--methods", "reuse", "--size", 1, *change)
    assert "other conditions" in error
    assert "another --json" in error
    bench.write("harbour", RECORDS[:1])
    assert "datasets was" in bench.fails("--methods", "reuse", "--size", 1)


@pytest.mark.parametrize("content", ["my notes\nof today\n", "my notes"])
def test_a_file_that_is_no_bench_is_left_alone(bench: Bench, content: str) -> None:
    partial = bench.out.parent / "r.partial.jsonl"
    partial.parent.mkdir()
    partial.write_text(content)
    assert "is not a file of this bench" in bench.fails("--methods", "reuse")
    assert partial.read_text() == content


@pytest.mark.slow
def test_distractors_leave_the_passages_that_hold_the_answer(bench: Bench) -> None:
    all_of_it = bench("--methods", "full", "--size", 1)["records"][0]["context_tokens"]
    bench.out = bench.out.with_name("few.json")
    assert bench("--methods", "full", "--size", 1, "--distractors", 0)["records"][0]["context_tokens"] < all_of_it
    bench.write("silent", [{**RECORDS[0], "supporting": []}])
    bench.out = bench.out.with_name("silent.json")
    found = bench("--methods", "full", "--distractors", 0, dataset="silent")
    assert found["records"][0]["context_tokens"] == all_of_it
    assert "1 questions do not say which passages" in bench.printed


@pytest.mark.slow
def test_the_qcfuse_releases_layout_and_names_are_understood(bench: Bench) -> None:
    release = [{"input": QUESTION, "context": PASSAGES, "answers": "school"} for _ in range(2)]
    bench.write("release", release)
    found = bench("--baseline", "ours", "--baseline", "fullreuse", "--top-k", 2, dataset="release")
    assert {r["method"] for r in found["records"]} == {"full", "no passages", "qcfuse", "reuse"}
    assert {r["id"] for r in found["records"]} == {"1", "2"}


@pytest.mark.slow
def test_several_datasets_and_a_folder_as_store(bench: Bench, tmp_path: Path) -> None:
    bench.write("other", RECORDS[:1])
    found = bench("--methods", "reuse", "--store", tmp_path / "kv", dataset="harbour,other")
    assert [(line["dataset"], line["method"], line["n"]) for line in found["summary"]] == [
        ("harbour", "full", 3),
        ("harbour", "no passages", 3),
        ("harbour", "reuse", 3),
        ("other", "full", 1),
        ("other", "no passages", 1),
        ("other", "reuse", 1),
    ]
    assert any((tmp_path / "kv").iterdir())


@pytest.mark.slow
def test_datasets_of_one_name_in_two_folders_are_two(drawing_bench: Bench, tmp_path: Path) -> None:
    bench = drawing_bench
    for name, records in (("a", RECORDS[:1]), ("b", RECORDS[1:])):
        (bench.data / name).mkdir()
        bench.write(f"{name}/dev", records)
    found = bench("--methods", "reuse", "--plots", tmp_path / "plots", dataset="a/dev,b/dev")
    assert [(line["dataset"], line["n"]) for line in found["summary"] if line["method"] == "full"] == [
        ("a/dev", 1),
        ("b/dev", 2),
    ]
    assert {path.name.split(".")[1] for path in (tmp_path / "plots").iterdir()} == {"a-dev", "b-dev"}


@pytest.mark.slow
def test_lines_of_a_table_are_in_the_order_asked_for(bench: Bench) -> None:
    found = bench("--methods", "reuse,qcfuse", "--ratios", ".1,.5")
    lines = [(line["method"], line["ratio"]) for line in found["summary"]]
    assert lines == [("full", 1.0), ("no passages", None), ("reuse", 0.0), ("qcfuse", 0.1), ("qcfuse", 0.5)]


@pytest.mark.slow
def test_a_number_of_tokens_is_not_crossed_with_ratios(bench: Bench) -> None:
    found = bench("--methods", "epic[n_tokens=0],epic", "--ratios", ".1", "--size", 1)
    bases = {line["method"]: (line["base"], line["ratio"]) for line in found["summary"]}
    assert bases["epic"] == ("blind", 0.1)
    assert bases["epic[n_tokens=0]"][0] == "begun"


def test_answers_that_a_guard_had_computed_in_full_are_told(bench: Bench) -> None:
    def noted(fallback: str | None) -> list[str]:
        return on_methods([{"method": "auto", "fallback": fallback}, {"method": "reuse", "fallback": None}])

    assert noted("1 of 3 passages computed in full: absent") == []
    [note] = noted("computed in full, nothing would be saved: predicted to take 1 s, fused 2 s")
    assert note.startswith("auto: 1 of 1 answers were computed in full")


@pytest.mark.slow
def test_questions_are_prepared_in_groups(bench: Bench) -> None:
    one_by_one = bench("--methods", "reuse", "--group", 1)
    bench.out = bench.out.with_name("at-once.json")
    at_once = bench("--methods", "reuse")
    answers = [
        [(r["id"], r["answer"]) for r in found["records"] if r["method"] == "reuse"] for found in (one_by_one, at_once)
    ]
    assert answers[0] == answers[1]
    chunks = [found["summary"][2]["offline_chunks"] for found in (one_by_one, at_once)]
    assert chunks == [9, 9], "titles differ, so no passage is in two questions"


@pytest.mark.slow
def test_a_question_too_long_for_the_model_is_named_and_left_out(bench: Bench) -> None:
    bench.write(
        "long", [RECORDS[0], {**RECORDS[1], "passages": [{"title": "", "text": PASSAGES[0] * 60}], "supporting": []}]
    )
    found = bench("--methods", "full", dataset="long")
    assert {r["id"] for r in found["records"]} == {"q0"}
    assert "long q1: its prompt exceeds the window of 2,048 tokens" in found["about"]["notes"][0]


@pytest.mark.slow
def test_rulers_tasks_are_made_when_there_is_no_file(drawing_bench: Bench) -> None:
    bench = drawing_bench
    found = bench("--methods", "reuse", "--size", 1, "--ruler-tokens", 1800, dataset="ruler_mv")
    (record,) = [r for r in found["records"] if r["method"] == "full"]
    assert 1000 < record["context_tokens"] < 1800
    assert (bench.out.parent / "r.ruler_mv.match-ttft.png").exists()
    error = bench.fails("--methods", "reuse", "--size", 1, "--ruler-tokens", 64, dataset="ruler_mq")
    least = int(re.search(r"ruler_mq does not fit 64 tokens.* need (\d+)", error)[1])  # type: ignore[index]
    bench.out = bench.out.with_name("least.json")
    assert bench("--methods", "reuse", "--size", 1, "--ruler-tokens", least, dataset="ruler_mq")["records"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--methods", "nothing"), "no method 'nothing'"),
        (("--json", "r.md"), "call it something.json, not r.md"),
        (("--methods", "qcfuse[depth=3]"), "does not take depth"),
        (("--methods", "qcfuse[depth"), "write a method as name"),
        (("--methods", "qcfuse", "--bases", "bare"), "no base 'bare'"),
        (("--dataset", "ruler_vt", "--top-k", "3"), "--top-k would cut away part of what ruler_vt hides"),
    ],
)
def test_mistakes_are_named_before_anything_is_loaded(bench: Bench, options: tuple[str, ...], says: str) -> None:
    assert says in bench.fails(*options)


def test_ratios_that_are_no_numbers_are_a_wrong_command_line(bench: Bench) -> None:
    code, _, err = bench.run(*bench.arguments("--ratios", "10%"))
    assert (code, "--ratios" in err, "is no list of numbers" in " ".join(err.split())) == (2, True, True)


def test_a_dataset_that_is_not_there_is_named_with_those_that_are(bench: Bench) -> None:
    error = bench.fails("--methods", "full", dataset="squad")
    assert "no dataset 'squad'" in error
    assert "harbour" in error
    assert "name a dataset" in bench.fails("--methods", "full", dataset=",,")


def test_the_default_method_is_measured_beside_full_prefill_where_none_is_named(bench: Bench) -> None:
    assert {record["method"] for record in bench("--size", 1)["records"]} == {"full", "no passages", "auto"}


def test_the_help_names_every_base_there_is(run: Run) -> None:
    code, printed, _ = run("quality", "--help")
    words = re.sub(r"[^\w-]+", " ", printed)
    assert code == 0
    assert all(base in words.split("--bases")[1].split("--size")[0] for base in BASES)
