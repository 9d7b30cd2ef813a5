"""RULER's tasks, generated: what they hide is there, whole and findable."""

from __future__ import annotations

import re

import pytest

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.verification.cases import NOISE, TASKS, generate
from tests.support.passages import PASSAGES


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


def words(text: str) -> int:
    return len(text.split())
