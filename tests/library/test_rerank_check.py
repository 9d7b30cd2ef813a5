"""The comparison of reranking with the retriever: ranks of the right passages, and the verdict on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.fusion.rerank import Reranking
from qcfuse_rag.library.index import IndexedPassage, PassageIndex
from qcfuse_rag.library.rerank_check import KnownQuestion, RerankCheck, check_reranking, read_questions

PASSAGES = [IndexedPassage(f"docs/{name}.md", f"It is {name}.") for name in "abcdef"]
VECTORS = np.array([[np.cos(angle), np.sin(angle)] for angle in np.arange(6) / 10], np.float32)


def embed(texts: Sequence[str]) -> NDArray[np.float32]:
    """Every question is nearest to `a`, then to `b`, and so on."""
    return np.array([[1.0, 0.0]] * len(texts), np.float32)


class Reversing:
    """Stands in for an engine that takes the retriever's last passage for the best."""

    def rerank(self, question: str, texts: Sequence[str], *, retrieved: Sequence[float]) -> Reranking:
        assert list(retrieved) == sorted(retrieved, reverse=True)
        return Reranking(order=tuple(reversed(range(len(texts)))))


def check(*answers: str) -> RerankCheck:
    questions = [KnownQuestion(question="Which?", answer=answer) for answer in answers]
    steps: list[tuple[int, int]] = []
    engine: Any = Reversing()
    retriever: Any = SimpleNamespace(index=PassageIndex("any", PASSAGES, VECTORS), embed_questions=embed)
    found = check_reranking(engine, retriever, questions, lambda *step: steps.append(step))
    assert steps == [(done, len(answers)) for done in range(1, len(answers) + 1)]
    return found


def test_ranks_are_those_of_the_first_right_passage() -> None:
    found = check("IT IS F", "it is c.", "nowhere")
    assert (found.questions, found.found) == (3, 2)
    assert found.retriever == {
        "recall@1": 0,
        "recall@4": pytest.approx(1 / 3),
        "mrr": pytest.approx((1 / 6 + 1 / 3) / 3),
    }
    assert found.reranked == {
        "recall@1": pytest.approx(1 / 3),
        "recall@4": pytest.approx(2 / 3),
        "mrr": pytest.approx(1.25 / 3),
    }
    assert found.difference == pytest.approx(found.reranked["mrr"] - found.retriever["mrr"])
    assert found.interval[0] <= found.difference <= found.interval[1]
    assert check("it is").retriever["recall@1"] == 1


@pytest.mark.parametrize(
    ("answers", "said", "passed"),
    [
        (["is f"] * 5, "reranking is better, on 5 questions: a right passage is first for 100%", True),
        (["is a"] * 5, "the retriever is better alone", False),
        (["is a", "is f"] * 3, "undecided", False),
        (["nowhere"], "undecided", False),
    ],
)
def test_the_verdict_is_beyond_chance(answers: list[str], said: str, passed: bool) -> None:
    found = check(*answers)
    assert found.verdict.startswith(said)
    assert found.passed is passed
    assert found.to_dict()["verdict"] == found.verdict


@pytest.mark.parametrize(
    ("known", "right"),
    [
        ({"answer": "it is"}, "abcdef"),
        ({"source": "c.md"}, "c"),
        ({"source": "docs/c.md", "answer": "is c"}, "c"),
        ({"source": "c.md", "answer": "is d"}, ""),
        ({"source": "/c.md"}, ""),
        ({"source": ".md"}, ""),
        ({"source": "ocs/c.md"}, ""),
    ],
)
def test_a_right_passage_has_the_answer_and_the_source(known: dict[str, str], right: str) -> None:
    question = KnownQuestion(question="Which?", **known)
    assert [passage.source[5] for passage in PASSAGES if question.is_right(passage)] == list(right)


def test_questions_are_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(
        json.dumps({"question": "Who?", "answer": "Ann", "id": 7})
        + "\n\n"
        + '{"question": "Where?\u2028Here\x85", "source": "a.md"}\r\n',
        "utf-8",
    )
    assert [(known.question, known.answer, known.source) for known in read_questions(path)] == [
        ("Who?", "Ann", ""),
        ("Where?\u2028Here\x85", "", "a.md"),
    ]
    for text in ("", "no JSON", '{"answer": "Ann"}', '{"question": "Who?"}', '{"question": " ", "answer": "Ann"}'):
        path.write_text(text)
        with pytest.raises(QCFuseError, match="has to be lines of questions, each with an answer"):
            read_questions(path)
    with pytest.raises(QCFuseError, match="has to be lines"):
        read_questions(tmp_path / "missing.jsonl")
