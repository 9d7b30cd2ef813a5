"""Questions of a file: three layouts; what cannot be used is named by line."""

from __future__ import annotations

import json
from dataclasses import replace
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


@pytest.mark.parametrize(
    ("record", "passages"),
    [
        ({**GOOD, "passages": [{"title": "T", "text": "x"}, {"title": "", "text": "z"}, "y"]}, ("T\nx", "z", "y")),
        ({"input": "Who?", "context": ["x", "y"], "answers": "Ann"}, ("x", "y")),
        (LONG_BENCH, ("Orla\nsteers.", "Ann sings.")),
        ({**LONG_BENCH, "context": "x\ny\n\nz"}, ("x\ny", "z")),
        ({**LONG_BENCH, "context": "Ann sings."}, ("Ann sings.",)),
    ],
    ids=["ours", "the release's", "LongBench's", "without headings", "one paragraph"],
)
def test_three_layouts_are_read(tmp_path: Path, record: dict[str, Any], passages: tuple[str, ...]) -> None:
    [example] = read_dataset(dataset(tmp_path, {**record, "id": None}))
    assert (example.passages, example.question, example.dataset, example.id) == (passages, "Who?", "crew", "1")


def test_the_first_questions_are_taken_and_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    text = "one\u2028two\u0085three\u2029four"
    lines = [json.dumps({**GOOD, "id": name, "passages": [text]}, ensure_ascii=False) for name in "ab"]
    (tmp_path / "crew.jsonl").write_bytes("\r\n".join([*lines, "not JSON, but never read"]).encode())
    assert [example.passages for example in read_dataset(tmp_path / "crew.jsonl", size=2)] == [(text,)] * 2
    assert list(passage_texts(tmp_path)) == [text] * 2


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ("{broken", "Expecting property name"),
        ("[]", "has no attribute"),
        (GOOD, "the id 'a' is there twice; give it another"),
        ({**GOOD, "answers": [3]}, "`answers` must be a string or a list of strings"),
        ({**GOOD, "answers": ["", " "]}, "there is no gold answer; give `answers`"),
        ({**GOOD, "passages": []}, "there are no passages"),
        ({**GOOD, "passages": [3]}, "a passage must be a string, or an object"),
        ({**GOOD, "passages": [{"title": "only"}]}, "`text` is missing"),
        ({**GOOD, "supporting": [4]}, "indices of the 4 passages"),
        ({**GOOD, "question": 3}, "the question must be a string"),
        ({"question": "Who?"}, "`passages` is missing"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line_with_what_is_expected(tmp_path: Path, record: Any, says: str) -> None:
    path = dataset(tmp_path, GOOD, record)
    with pytest.raises(BadDataset, match=r"crew\.jsonl, line 2: ") as error:
        read_dataset(path)
    assert says in str(error.value)


def test_distractors_are_the_first_others_in_their_order(tmp_path: Path) -> None:
    passages = [{"title": "", "text": str(i)} for i in range(6)]
    (example,) = read_dataset(dataset(tmp_path, {**GOOD, "passages": passages, "supporting": [4, 1]}))
    assert example.with_distractors(2).passages == ("0", "1", "2", "4")
    assert example.with_distractors(2).supporting == (1, 3)
    assert example.with_distractors(0).passages == ("1", "4")
    assert example.with_distractors(9) == example
    assert replace(example, supporting=(), answers=("4",)).with_distractors(0).passages == ("4",), "where it stands"


def test_a_haystack_is_made_of_whatever_passages_there_are(tmp_path: Path) -> None:
    lines = [json.dumps({"input": "?", "context": ["second"], "answers": "x"}), "[1]", "{", json.dumps(LONG_BENCH)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    dataset(tmp_path, {**GOOD, "passages": [{"title": "unseen", "text": "third"}]}).rename(tmp_path / "c.jsonl")
    assert list(passage_texts(tmp_path)) == ["second", "Orla\nsteers.", "Ann sings.", "third"]
