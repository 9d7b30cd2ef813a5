"""The parts of the quality bench: datasets, generated tasks, scores, configurations, intervals."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from qcfuse_rag.bench.bootstrap import mean_interval
from qcfuse_rag.bench.configurations import configurations, split_names
from qcfuse_rag.bench.datasets import BadDataset, first_passages, passage_texts, read_dataset, with_distractors
from qcfuse_rag.bench.metrics import exact_match, rouge_l, rouge_scorer, scores, string_match, token_f1
from qcfuse_rag.bench.prepare import OfflineCost, prepare
from qcfuse_rag.bench.ruler import NOISE, TASKS, generate
from qcfuse_rag.bench.summary import summarize
from qcfuse_rag.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError, UnknownMethod
from tests.conftest import PASSAGES

GOOD = {"id": "a", "question": "Who?", "answers": ["Orla"], "passages": [{"title": "Crew", "text": "Orla."}] * 4}


def dataset(tmp_path: Path, *records: Any) -> Path:
    path = tmp_path / "crew.jsonl"
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return path


def test_a_passage_is_its_title_and_its_text(tmp_path: Path) -> None:
    records = [GOOD, {**GOOD, "id": "b", "passages": [{"title": "", "text": "Orla."}]}]
    first, second = read_dataset(dataset(tmp_path, *records))
    assert first.passages[0] == "Crew\nOrla."
    assert second.passages == ("Orla.",)
    assert (first.id, first.dataset, first.question, first.answers) == ("a", "crew", "Who?", ("Orla",))


def test_the_first_questions_are_taken(tmp_path: Path) -> None:
    path = dataset(tmp_path, *({**GOOD, "id": str(i)} for i in range(5)), "not JSON, but never read")
    assert [example.id for example in read_dataset(path, size=3)] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ("{broken", "not a record"),
        ("[]", "must be a JSON object"),
        ({**GOOD, "answers": []}, "no gold answer"),
        ({**GOOD, "answers": [3]}, "an answer must be a string"),
        ({**GOOD, "passages": []}, "no passage"),
        ({**GOOD, "passages": ["text"]}, "not a record"),
        ({**GOOD, "passages": [{"title": "only"}]}, "no 'text'"),
        ({**GOOD, "supporting": [4]}, "indices of the 4 passages"),
        ({key: value for key, value in GOOD.items() if key != "question"}, "no 'question'"),
        ({"question": "Who?"}, "no 'passages'"),
        (GOOD, "is there twice"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, record: Any, says: str) -> None:
    with pytest.raises(BadDataset, match=r"crew\.jsonl, line 2: .*") as error:
        read_dataset(dataset(tmp_path, GOOD, record))
    assert says in str(error.value)


def test_an_empty_or_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadDataset, match="holds no question"):
        read_dataset(dataset(tmp_path, ""))
    with pytest.raises(BadDataset, match="--data-dir"):
        read_dataset(tmp_path / "nothing.jsonl")


def test_distractors_are_the_first_others_in_their_order(tmp_path: Path) -> None:
    passages = [{"title": "", "text": str(i)} for i in range(6)]
    (example,) = read_dataset(dataset(tmp_path, {**GOOD, "passages": passages, "supporting": [4, 1]}))
    assert with_distractors(example, 2).passages == ("0", "1", "2", "4")
    assert with_distractors(example, 2).supporting == (1, 3)
    assert with_distractors(example, 0).passages == ("1", "4")
    assert with_distractors(example, 9).passages == example.passages
    assert first_passages(example, 3).passages == ("0", "1", "2")
    assert first_passages(example, 3).supporting == (1,)


def test_words_are_compared_without_case_punctuation_and_articles() -> None:
    assert token_f1("The Eiffel  Tower!", ["eiffel tower"]) == 1
    assert token_f1("in the Eiffel Tower", ["Paris", "Eiffel Tower"]) == pytest.approx(2 * 2 / 5)
    assert token_f1("", ["Paris"]) == 0
    assert token_f1("no no no", ["no"]) == pytest.approx(0.5), "a word counts as often as both have it"
    assert (exact_match("An Orla.", ["orla"]), exact_match("Orla B", ["Orla"])) == (1, 0)


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
    return [one.key for one in configurations(split_names(names), ratios, bases)]


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
    one = configurations(split_names(f"{label}, reuse"), [0.1])[1]
    assert (one.label, one.method.probe.layers, one.method.probe.anchor_ratio) == (label, (1, 2), 0.3)  # type: ignore[union-attr]
    assert keys("epic[ratio=none,n_tokens=4,base=framed]", ratios=(0.1, 0.2), bases=("blind",))[1:] == [
        ("epic[ratio=none,n_tokens=4,base=framed]", "framed", None)
    ]
    with pytest.raises(UnknownMethod, match=r"name\[parameter=value"):
        keys("qcfuse[3]")


@pytest.mark.parametrize("task", TASKS)
def test_generated_tasks_hide_every_part_of_the_answer_whole(task: str) -> None:
    sentences = [" ".join(PASSAGES)] * 20
    made = generate(task, 4, tokens=1200, count=words, haystack=sentences, seed=3)
    assert made == generate(task, 4, tokens=1200, count=words, haystack=sentences, seed=3)
    assert made != generate(task, 4, tokens=1200, count=words, haystack=sentences, seed=4)
    for example in made:
        assert len(example.answers) == len(set(example.answers)) == (5 if task == "ruler_vt" else 4)
        hiding = example.passages[1:] if task == "ruler_vt" else example.passages
        assert all(any(answer in passage for passage in hiding) for answer in example.answers)
        total = words(example.question) + sum(map(words, example.passages)) + example.max_new_tokens
        assert 1200 - words(NOISE) - 25 < total <= 1200
        assert max(map(words, hiding)) <= 150
    assert len({example.answers for example in made}) == 4


def test_a_chain_is_in_order_and_no_line_is_cut() -> None:
    (example,) = generate("ruler_vt", 1, tokens=1200, count=words, haystack=[], seed=0)
    lines = [line for passage in example.passages[1:] for line in passage.split("\n")]
    assigned = [line for line in lines if line.startswith("VAR")]
    names = example.answers
    value = assigned[0].split(" = ")[1]
    assert assigned == [f"VAR {names[0]} = {value}", *(f"VAR {names[i]} = VAR {names[i - 1]}" for i in range(1, 5))]
    assert value in example.question
    assert {line for line in lines if line not in assigned} == {NOISE}


def test_a_task_that_does_not_fit_says_so() -> None:
    with pytest.raises(QCFuseError, match="--ruler-tokens"):
        generate("ruler_mv", 1, tokens=100, count=words, haystack=PASSAGES, seed=0)


def test_a_haystack_is_made_of_whatever_passages_there_are(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(json.dumps({"input": "?", "context": ["second"], "answers": "x"}) + "\n[1]\n{")
    dataset(tmp_path, {**GOOD, "passages": [{"title": "unseen", "text": "third"}]}).rename(tmp_path / "c.jsonl")
    assert list(passage_texts(tmp_path)) == ["second", "third"]


def test_an_interval_is_where_the_means_of_resamples_lie() -> None:
    values = [0.0, 1.0] * 50
    found = mean_interval(values)
    half = 1.96 * statistics.pstdev(values) / 10
    assert found["mean"] == 0.5
    assert (found["low"], found["high"]) == (pytest.approx(0.5 - half, abs=0.02), pytest.approx(0.5 + half, abs=0.02))
    assert mean_interval(values) == found
    assert mean_interval([0.25]) == {"mean": 0.25, "low": 0.25, "high": 0.25}


def test_differences_are_paired_by_question() -> None:
    zeros = dict.fromkeys(["em", "rouge_l", "match", "nll", "kl", "probe_s", "select_s"], 0.0)

    def record(method: str, name: str, f1: float, **more: float) -> dict[str, Any]:
        base, ratio = (None, 1.0) if method == "full" else ("blind", 0.1)
        about = {"dataset": "d", "method": method, "base": base, "ratio": ratio, "id": name}
        return {**about, **zeros, "f1": f1, "ttft_s": 1.0, "full_ttft_s": 2.0, **more}

    records = [record("full", str(i), f1=i / 10) for i in range(10)]
    records += [record("qcfuse", str(i), f1=i / 10 - 0.1) for i in reversed(range(5))]
    records += [record("random", str(i), f1=0.0, kl=1.0) for i in range(5)]
    costs = [OfflineCost("warm blind", 4, 1.0, 400), OfflineCost("warm blind", 1, 1.0, 100)]
    full, qcfuse, _ = summarize(records, costs, {("qcfuse", "blind", 0.1): "warm blind"})
    assert {name: round(value, 9) for name, value in qcfuse["minus_full"]["f1"].items()} == {
        "mean": -0.1,
        "low": -0.1,
        "high": -0.1,
    }
    assert qcfuse["minus_random"]["kl"]["mean"] == -1
    assert qcfuse["ttft_to_full"] == 0.5
    assert (qcfuse["offline_s_per_chunk"], qcfuse["offline_bytes_per_chunk"]) == (0.4, 100)
    assert full["zero_share"] == 0.1


def test_each_preparation_is_done_once_and_charged_to_all_who_need_it(engine: FusionEngine) -> None:
    chosen = configurations(["reuse", "prophetkv", "qcfuse"], [0.1])
    costs = prepare(engine, chosen, [*PASSAGES, *PASSAGES])
    assert set(costs) == {"warm framed", "warm blind"}
    assert all(cost.chunks == 3 and cost.seconds > 0 and cost.size_bytes > 0 for cost in costs.values())
    assert prepare(engine, chosen, PASSAGES)["warm blind"].chunks == 0, "what is there costs nothing"


def test_enriched_passages_are_charged_with_the_framed_ones_they_are_made_from(
    engine: FusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qcfuse_rag.bench.prepare.embedded_neighbours", lambda passages: [[1], [2], [0]])
    costs = prepare(engine, configurations(["fusionrag", "reuse"], [0.1]), PASSAGES)
    enriched, framed = costs["warm enriched"], costs["warm framed"]
    assert enriched.chunks == framed.chunks == 3
    assert enriched.size_bytes == 2 * framed.size_bytes
    assert enriched.seconds > framed.seconds


def words(text: str) -> int:
    return len(text.split())
