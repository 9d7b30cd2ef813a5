"""Questions of a file: three layouts; what cannot be used is named by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.questions import BadDataset, passage_texts, read_dataset

GOOD = {"id": "a", "question": "Who?", "answers": ["Orla"], "passages": [{"title": "Crew", "text": "Orla."}] * 4}
LONG_BENCH = {"input": "Who?", "context": "Passage 1:\nOrla\nsteers.\n\nPassage 2:\nAnn sings.", "answers": ["Ann"]}


def dataset(tmp_path: Path, *records: Any) -> Path:
    path = tmp_path / "crew.jsonl"
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return path


def test_a_passage_is_its_title_and_its_text(tmp_path: Path) -> None:
    records = [GOOD, {**GOOD, "id": "b", "passages": [{"title": "", "text": "Orla."}, {"text": "Ann."}, "Lisa."]}]
    first, second = read_dataset(dataset(tmp_path, *records))
    assert first.passages[0] == "Crew\nOrla."
    assert second.passages == ("Orla.", "Ann.", "Lisa.")
    assert (first.id, first.dataset, first.question, first.answers) == ("a", "crew", "Who?", ("Orla",))


@pytest.mark.parametrize(
    ("record", "passages"),
    [
        ({**GOOD, "passages": [{"title": "T", "text": "x"}, "y"]}, ("T\nx", "y")),
        ({"input": "Who?", "context": ["x", "y"], "answers": "Ann"}, ("x", "y")),
        (LONG_BENCH, ("Orla\nsteers.", "Ann sings.")),
        ({**LONG_BENCH, "context": "x\ny\n\nz"}, ("x\ny", "z")),
        ({**LONG_BENCH, "context": "Ann sings."}, ("Ann sings.",)),
    ],
    ids=["ours", "the release's", "LongBench's", "without headings", "one paragraph"],
)
def test_three_layouts_are_read(tmp_path: Path, record: dict[str, Any], passages: tuple[str, ...]) -> None:
    [example] = read_dataset(dataset(tmp_path, record))
    assert (example.passages, example.question) == (passages, "Who?")


def test_the_first_questions_are_taken(tmp_path: Path) -> None:
    path = dataset(tmp_path, *({**GOOD, "id": str(i)} for i in range(5)), "not JSON, but never read")
    assert [example.id for example in read_dataset(path, size=3)] == ["0", "1", "2"]


def test_a_question_without_an_id_is_called_by_its_line(tmp_path: Path) -> None:
    records = [{**GOOD, "id": None}, {**GOOD, "id": None}, LONG_BENCH, {**GOOD, "id": 0}]
    assert [example.id for example in read_dataset(dataset(tmp_path, *records))] == ["1", "2", "3", "0"]


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    text = "one\u2028two\u0085three\u2029four"
    lines = [json.dumps({**GOOD, "id": name, "passages": [text]}, ensure_ascii=False) for name in "ab"]
    path = tmp_path / "crew.jsonl"
    path.write_bytes("\r\n".join([*lines, ""]).encode())
    assert [example.passages for example in read_dataset(path)] == [(text,)] * 2
    assert list(passage_texts(tmp_path)) == [text] * 2


def test_a_blank_answer_is_none(tmp_path: Path) -> None:
    (example,) = read_dataset(dataset(tmp_path, {**GOOD, "answers": ["", "Ann", " "]}))
    assert example.answers == ("Ann",)
    assert example.gold == "Ann"
    path = dataset(tmp_path, {**GOOD, "answers": ["", " "]})
    with pytest.raises(BadDataset, match=r"crew\.jsonl, line 1: there is no gold answer"):
        read_dataset(path)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ("{broken", "Expecting property name"),
        ("[]", "has no attribute"),
        ({**GOOD, "answers": [3]}, "`answers` must be a string or a list of strings"),
        ({**GOOD, "answers": 3}, "`answers` must be a string or a list of strings"),
        ({**GOOD, "passages": []}, "there are no passages"),
        ({**GOOD, "passages": "text"}, "`passages` must be a list"),
        ({**GOOD, "passages": [3]}, "a passage must be a string, or an object"),
        ({**GOOD, "passages": [{"title": "only"}]}, "`text` is missing"),
        ({**GOOD, "supporting": [4]}, "indices of the 4 passages"),
        ({**GOOD, "supporting": 1}, "indices of the 4 passages"),
        ({**GOOD, "question": 3}, "the question must be a string"),
        ({key: value for key, value in GOOD.items() if key != "question"}, "`question` is missing"),
        ({"question": "Who?"}, "`passages` is missing"),
        ({"question": "Who?", "context": "x"}, "`input` is missing"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line_with_what_is_expected(tmp_path: Path, record: Any, says: str) -> None:
    path = dataset(tmp_path, GOOD, record)
    with pytest.raises(BadDataset, match=r'crew\.jsonl, line 2: .*; expected {"question"') as error:
        read_dataset(path)
    assert says in str(error.value)


def test_what_the_bench_needs_beyond_that_is_named_too(tmp_path: Path) -> None:
    with pytest.raises(BadDataset, match=r"crew\.jsonl, line 2: there is no gold answer; give `answers`"):
        read_dataset(dataset(tmp_path, GOOD, {**GOOD, "answers": []}))
    with pytest.raises(BadDataset, match=r"crew\.jsonl, line 2: the id 'a' is there twice; give it another"):
        read_dataset(dataset(tmp_path, GOOD, GOOD))


def test_an_empty_or_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadDataset, match="holds no question"):
        read_dataset(dataset(tmp_path, ""))
    with pytest.raises(BadDataset, match=r"cannot read .*nothing\.jsonl .*; name a file of JSON lines"):
        read_dataset(tmp_path / "nothing.jsonl")


def test_distractors_are_the_first_others_in_their_order(tmp_path: Path) -> None:
    passages = [{"title": "", "text": str(i)} for i in range(6)]
    (example,) = read_dataset(dataset(tmp_path, {**GOOD, "passages": passages, "supporting": [4, 1]}))
    assert example.with_distractors(2).passages == ("0", "1", "2", "4")
    assert example.with_distractors(2).supporting == (1, 3)
    assert example.with_distractors(2).id == example.id
    assert example.with_distractors(0).passages == ("1", "4")
    assert example.with_distractors(9) == example
    assert example.keeping([0, 1, 2]).passages == ("0", "1", "2")
    assert example.keeping([0, 1, 2]).supporting == (1,)


def test_a_haystack_is_made_of_whatever_passages_there_are(tmp_path: Path) -> None:
    lines = [json.dumps({"input": "?", "context": ["second"], "answers": "x"}), "[1]", "{", json.dumps(LONG_BENCH)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    dataset(tmp_path, {**GOOD, "passages": [{"title": "unseen", "text": "third"}]}).rename(tmp_path / "c.jsonl")
    assert list(passage_texts(tmp_path)) == ["second", "Orla\nsteers.", "Ann sings.", "third"]
