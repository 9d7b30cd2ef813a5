"""The parts of the quality bench: generated tasks, scores, configurations, intervals, preparations."""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality.arena_score import gap_recovered
from benchmarks.quality.configurations import configurations, split_names
from benchmarks.quality.metrics import exact_match, rouge_l, rouge_scorer, scores, token_f1
from benchmarks.quality.offline import CAPTURED_TOGETHER, NeighbourPool, OfflineCost, prepare
from benchmarks.quality.summary import NEARNESS, mean_interval, summarize
from benchmarks.quality.tables import draw, row
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError, UnknownMethod
from qcfuse_rag.methods.captures.job import covering_groups
from qcfuse_rag.methods.fusionrag import ENRICHED
from qcfuse_rag.store.prefill_base import FRAMED
from qcfuse_rag.verification.cases import NOISE, TASKS, generate, string_match
from tests.support import seams
from tests.support.passages import PASSAGES


def test_words_are_compared_without_case_punctuation_and_articles() -> None:
    assert token_f1("The Eiffel  Tower!", ["eiffel tower"]) == 1
    assert token_f1("in the Eiffel Tower", ["Paris", "Eiffel Tower"]) == pytest.approx(2 * 2 / 5)
    assert token_f1("", ["Paris"]) == 0
    assert token_f1("no no no", ["no"]) == pytest.approx(0.5), "a word counts as often as both have it"
    assert (exact_match("An Orla.", ["orla"]), exact_match("Orla B", ["Orla"])) == (1, 0)


def test_answers_without_words_are_compared_by_their_characters() -> None:
    assert (exact_match("\\", [":"]), token_f1("\\", [":"])) == (0, 0)
    assert (exact_match(" : ", [":"]), token_f1(" : ", [":"])) == (1, 1)
    assert (exact_match("a", ["A"]), exact_match("the", ["A"])) == (1, 0), "an article can be the answer"
    assert (exact_match("", ["-"]), exact_match("...", ["Orla"]), token_f1("a ferry", ["A"])) == (0, 0, 0)


def test_rouge_is_that_of_the_package_with_stemming() -> None:
    assert rouge_l("captains of ferries", ["captain of the ferry"]) == pytest.approx(2 * (3 / 3) * (3 / 4) / (7 / 4))
    assert rouge_l("nothing", ["captain", "nothing at all"]) == pytest.approx(0.5)


def test_parts_of_an_answer_count_each_when_all_are_needed() -> None:
    gold = ["123", "456", "789", "000"]
    assert string_match("123 and 456", gold, needs_all=True) == 0.5
    assert string_match("123 and 456", gold, needs_all=False) == 1
    assert string_match("Orla", ["ORLA"], needs_all=False) == 1
    assert scores("123, 456, 789, 000", gold, needs_all=True) == {"f1": 1, "em": 1, "rouge_l": 1, "match": 1}


def test_without_rouge_score_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    rouge_scorer.cache_clear()
    with pytest.raises(QCFuseError, match=r'pip install "qcfuse-rag\[bench\]"'):
        rouge_l("a", ["a"])


def keys(names: str, *, ratios: tuple[float, ...] = (), bases: tuple[str, ...] = ()) -> list[Any]:
    return [configuration.key for configuration in configurations(split_names(names), ratios, bases)]


def test_methods_are_crossed_with_what_they_take() -> None:
    assert keys("reuse,prophetkv", ratios=(0.1, 0.2)) == [
        ("full", None, 1.0),
        ("reuse", "framed", 0.0),
        ("prophetkv", "blind", 0.1),
        ("prophetkv", "blind", 0.2),
    ]
    assert keys("full,reuse", bases=("blind", "framed"))[1:] == [("reuse", "blind", 0.0), ("reuse", "framed", 0.0)]
    assert keys("prophetkv")[1:] == [("prophetkv", "blind", 0.2)], "published defaults"


def test_the_control_stands_on_the_bases_of_the_methods_it_controls() -> None:
    assert ("random", "blind", 0.1) in keys("random,reuse,qcfuse", ratios=(0.1,))
    assert ("random", "framed", 0.1) not in keys("random,reuse,qcfuse", ratios=(0.1,))
    assert keys("random", ratios=(0.1,))[1:] == [("random", "framed", 0.1)], "alone, its own"
    assert keys("random,qcfuse", ratios=(0.1,), bases=("framed",))[1:] == [
        ("qcfuse", "framed", 0.1),
        ("random", "framed", 0.1),
    ]


def test_a_name_can_carry_parameters() -> None:
    label = "qcfuse[anchor_ratio=0.3,layers=1+2]"
    configuration = configurations(split_names(f"{label}, reuse"), [0.1])[1]
    assert configuration.label == label
    probe = configuration.method.probe
    assert (probe.layers, probe.anchor_ratio) == ((1, 2), 0.3)  # type: ignore[union-attr]
    assert keys("epic[ratio=none,n_tokens=4,base=framed]", ratios=(0.1, 0.2), bases=("blind",))[1:] == [
        ("epic[ratio=none,n_tokens=4,base=framed]", "framed", None)
    ]
    with pytest.raises(UnknownMethod, match=r"name\[parameter=value"):
        keys("qcfuse[3]")


def test_every_random_is_a_control_whatever_else_it_is_given() -> None:
    assert keys("random[seed=3],qcfuse", ratios=(0.1,))[1:] == [
        ("qcfuse", "blind", 0.1),
        ("random[seed=3]", "blind", 0.1),
    ]
    assert keys("random[ratio=0.3],random[seed=3],qcfuse[ratio=0.3]", ratios=(0.1,))[1:] == [
        ("qcfuse[ratio=0.3]", "blind", 0.3),
        ("random[ratio=0.3]", "blind", 0.3),
        ("random[seed=3]", "blind", 0.1),
    ]


def test_the_names_of_the_release_take_parameters_too() -> None:
    assert keys("ours[ratio=.2],fullcomp,fullreuse") == [
        ("full", None, 1.0),
        ("qcfuse[ratio=.2]", "blind", 0.2),
        ("reuse", "framed", 0.0),
    ]


@pytest.mark.parametrize("task", TASKS)
def test_generated_tasks_hide_every_part_of_the_answer_whole(task: str) -> None:
    sentences = [" ".join(PASSAGES)] * 20
    made = generate(task, 4, tokens=1200, count=words, haystack=sentences, seed=3)
    assert made == generate(task, 4, tokens=1200, count=words, haystack=sentences, seed=3)
    assert made != generate(task, 4, tokens=1200, count=words, haystack=sentences, seed=4)
    for example in made:
        assert len(example.expected) == len(set(example.expected)) == (5 if task == "ruler_vt" else 4)
        hiding = example.passages[1:] if task == "ruler_vt" else example.passages
        assert all(any(answer in passage for passage in hiding) for answer in example.expected)
        total = words(example.question) + sum(map(words, example.passages)) + example.max_new_tokens
        assert 1200 - words(NOISE) - 25 < total <= 1200
        assert max(map(words, hiding)) <= 150
    assert len({example.expected for example in made}) == 4


def test_a_chain_is_in_order_and_no_line_is_cut() -> None:
    (example,) = generate("ruler_vt", 1, tokens=1200, count=words, haystack=[], seed=0)
    lines = [line for passage in example.passages[1:] for line in passage.split("\n")]
    assigned = [line for line in lines if line.startswith("VAR")]
    names = example.expected
    value = assigned[0].split(" = ")[1]
    assert assigned == [f"VAR {names[0]} = {value}", *(f"VAR {names[i]} = VAR {names[i - 1]}" for i in range(1, 5))]
    assert value in example.question
    assert {line for line in lines if line not in assigned} == {NOISE}


@pytest.mark.parametrize("task", TASKS)
def test_a_task_that_does_not_fit_says_what_was_asked_for_and_what_would_do(task: str) -> None:
    def made(tokens: int) -> int:
        return len(generate(task, 3, tokens=tokens, overhead_tokens=30, count=words, haystack=PASSAGES, seed=0))

    with pytest.raises(QCFuseError, match=rf"{task} does not fit 64 tokens.*give at least that length") as error:
        made(64)
    least = int(re.search(r"need (\d+)", str(error.value))[1])  # type: ignore[index]
    assert least > 64
    assert made(least) == 3
    with pytest.raises(QCFuseError, match=f"need {least}"):
        made(least - 1)


def test_an_interval_is_where_the_means_of_resamples_lie() -> None:
    values = [0.0, 1.0] * 50
    found = mean_interval(values)
    half = 1.96 * statistics.pstdev(values) / 10
    assert found["mean"] == 0.5
    assert (found["low"], found["high"]) == (pytest.approx(0.5 - half, abs=0.02), pytest.approx(0.5 + half, abs=0.02))
    assert mean_interval(values) == found
    assert mean_interval([0.25]) == {"mean": 0.25, "low": 0.25, "high": 0.25}


def record(method: str, name: str, f1: float, **more: object) -> dict[str, Any]:
    zeros = dict.fromkeys(["em", "rouge_l", "match", "nll", *NEARNESS, "probe_s", "select_s"], 0.0)
    base, ratio = (None, 1.0) if method == "full" else ("blind", 0.1)
    about = {"dataset": "d", "method": method, "base": base, "ratio": ratio, "id": name}
    return {**about, **zeros, "f1": f1, "ttft_s": 1.0, "full_ttft_s": 2.0, **more}


def test_differences_are_paired_by_question() -> None:
    records = [record("full", str(i), f1=i / 10) for i in range(10)]
    records += [record("qcfuse", str(i), f1=i / 10 - 0.1) for i in reversed(range(5))]
    records += [record("random", str(i), f1=0.0, answer_kl=1.0) for i in range(5)]
    costs = [OfflineCost("warm blind", 4, 1.0, 400), OfflineCost("warm blind", 1, 1.0, 100)]
    full, qcfuse, _ = summarize(records, costs, {("qcfuse", "blind", 0.1): "warm blind"})
    assert {name: round(value, 9) for name, value in qcfuse["minus_full"]["f1"].items()} == {
        "mean": -0.1,
        "low": -0.1,
        "high": -0.1,
    }
    assert qcfuse["minus_random"]["answer_kl"]["mean"] == -1
    assert qcfuse["ttft_to_full"] == 0.5
    assert (qcfuse["offline_s_per_chunk"], qcfuse["offline_bytes_per_chunk"]) == (0.4, 100)
    assert full["zero_share"] == 0.1


def without_passages(name: str, f1: float, **more: object) -> dict[str, Any]:
    return record("no passages", name, f1, base=None, ratio=None, **more)


def test_what_a_method_recovers_is_its_share_of_full_prefills_gain() -> None:
    records = [record("full", str(i), f1=0.8, match=0.5) for i in range(4)]
    records += [without_passages(str(i), f1=0.4, match=0.5) for i in range(4)]
    records += [record("qcfuse", str(i), f1=f1, match=0.5) for i, f1 in enumerate((0.8, 0.7, 0.6, 0.3))]
    full, bottom, qcfuse = (line["recovered"] for line in summarize(records))
    assert full["mean"] == full["low"] == full["high"] == pytest.approx(1)
    assert bottom["mean"] == bottom["low"] == bottom["high"] == 0
    assert qcfuse["mean"] == pytest.approx((0.6 - 0.4) / (0.8 - 0.4))
    assert -0.25 <= qcfuse["low"] < qcfuse["mean"] < qcfuse["high"] <= 1
    arena = gap_recovered([0.8, 0.7, 0.6, 0.3], [0.4] * 4, [0.8] * 4)
    assert qcfuse == {"mean": arena["pgr"], "low": arena["pgr_low"], "high": arena["pgr_high"]}
    ruler = summarize([{**line, "dataset": "ruler_mv"} for line in records])
    assert [line["recovered"] for line in ruler] == [None] * 3, (
        "by match, full prefill finds no more than without passages"
    )
    close = summarize([{**line, "f1": line["f1"] / 1000} for line in records])
    assert [line["recovered"] for line in close] == [None] * 3, "a gap of 0.0004 is none"


def test_what_is_recovered_has_no_interval_where_full_prefill_may_gain_nothing() -> None:
    records = [
        record("full", "0", f1=1.0),
        record("full", "1", f1=0.0),
        without_passages("0", f1=0.0),
        without_passages("1", f1=0.9),
    ]
    line = summarize([*records, record("reuse", "0", f1=0.5), record("reuse", "1", f1=0.5)])[-1]
    assert line["recovered"] == {"mean": pytest.approx(0.5 / 0.5 * 0.1 / 0.1), "low": None, "high": None}
    assert "%" in row(line)["recovered"]
    assert "[" not in row(line)["recovered"]


def test_a_control_is_known_by_its_method_its_base_and_its_ratio() -> None:
    records = [record(method, "0", f1=0.0) for method in ("full", "qcfuse[layers=1]", "reuse")]
    records += [
        record("random[seed=3]", "0", f1=0.0, answer_kl=1.0),
        record("random[ratio=0.2]", "0", f1=0, ratio=0.2, answer_kl=9.0),
    ]
    lines = {line["method"]: line["minus_random"] for line in summarize(records)}
    assert lines["qcfuse[layers=1]"]["answer_kl"]["mean"] == lines["reuse"]["answer_kl"]["mean"] == -1
    assert lines["random[seed=3]"] is lines["random[ratio=0.2]"] is lines["full"] is None
    again = summarize([*records, record("random", "0", f1=0.0, answer_kl=2.0)])
    assert again[1]["minus_random"]["answer_kl"]["mean"] == -2, "the plain one, if it is there"


def test_each_preparation_is_done_once_and_charged_to_all_who_need_it(engine: FusionEngine) -> None:
    chosen = configurations(["reuse", "prophetkv", "qcfuse"], [0.1])
    costs = prepare(engine, chosen, [*PASSAGES, *PASSAGES])
    assert set(costs) == {"warm framed", "warm blind"}
    assert all(cost.chunks == 3 and cost.seconds > 0 and cost.size_bytes > 0 for cost in costs.values())
    assert prepare(engine, chosen, PASSAGES)["warm blind"].chunks == 0, "what is there costs nothing"


def test_enriched_passages_are_charged_with_the_framed_ones_they_are_made_from(
    engine: FusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seams.nearest_passages(monkeypatch, lambda passages, count: [[1], [2], [0]])
    costs = prepare(engine, configurations(["fusionrag", "reuse"], [0.1]), PASSAGES)
    enriched, framed = costs["warm enriched"], costs["warm framed"]
    assert enriched.chunks == framed.chunks == 3
    assert enriched.size_bytes == 2 * framed.size_bytes
    assert enriched.seconds > framed.seconds


def test_neighbours_are_searched_in_a_corpus(engine: FusionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A passage of no question may enrich one, and is not itself prepared for questions."""
    asked, other = PASSAGES[:2], "An otter lives under the old mill."
    seen: list[tuple[list[str], int]] = []

    def neighbours(passages: list[str], count: int) -> list[list[int]]:
        seen.append((passages, count))
        return [[2], [2], [0]]

    seams.nearest_passages(monkeypatch, neighbours)
    costs = prepare(engine, configurations(["fusionrag"], [0.1]), asked, NeighbourPool((asked[1], other, other), 3))
    assert seen == [([*asked, other], 3)]
    assert costs["warm enriched"].chunks == 2
    otter = engine.prompts.chunk_ids(other)
    assert not any(key in engine.store for key in engine.corpus.keys(otter, [FRAMED, ENRICHED]))
    [key] = engine.corpus.keys(engine.prompts.chunk_ids(asked[0]), [ENRICHED])
    assert engine.corpus.open_sources().derivations.origins(key) == {
        engine.corpus.open_sources().passage_id(engine.corpus.keys(otter, [FRAMED])[0])
    }


def test_primed_passages_are_charged_with_the_framed_ones_that_come_first(engine: FusionEngine) -> None:
    costs = prepare(engine, configurations(["auto", "reuse"], [0.1]), PASSAGES)
    assert costs["warm primed"].size_bytes == 2 * costs["warm framed"].size_bytes


def test_a_passage_captured_in_several_groups_is_one_passage(
    engine: FusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seams.nearest_passages(monkeypatch, lambda passages: [[1, 2], [0, 2], [1, 0]])
    chosen = configurations(["cachecraft"])
    groups = covering_groups([[1, 2], [0, 2], [1, 0]], CAPTURED_TOGETHER)
    assert sum(len(group) - 1 for group in groups) > 3, "or nothing is captured twice"
    costs = prepare(engine, chosen, PASSAGES)
    assert costs["capture variant, warm framed"].chunks == len(PASSAGES)
    assert prepare(engine, chosen, PASSAGES)["capture variant, warm framed"].chunks == 0


def test_equal_scores_can_be_drawn(tmp_path: Path) -> None:
    """The mean of 103 equal scores is outside of its interval by a rounding error."""
    line = {"dataset": "d", "method": "full", "base": None, "ratio": 1.0, "ttft_s": 1.0, "n": 103, "f1": 1.0}
    interval = mean_interval([1.0] * 103)
    assert [path.exists() for path in draw([{**line, "intervals": {"f1": interval}}], tmp_path, "r")] == [True, True]


def words(text: str) -> int:
    return len(text.split())
