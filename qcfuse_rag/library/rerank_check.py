"""Compare reranking with the retriever on a user's questions, whose passages are known.

Questions that quote a passage, such as those of `verification.cases`, would not do: a model finds quoted words by
copying, so that reranking looks better on them than it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.library.index import IndexedPassage
from qcfuse_rag.library.retriever import Retriever
from qcfuse_rag.verification.sweep import mean_interval

NEAREST = 40
"""Passages to order for each question."""


class KnownQuestion(BaseModel):
    """A question; a right passage contains the answer, whatever its case, and is of the source, as far as given."""

    model_config = ConfigDict(extra="ignore")

    question: str
    answer: str = ""
    source: str = ""

    def is_right(self, passage: IndexedPassage) -> bool:
        """Return whether a passage is one of those to be found; a source may be given by the end of its path."""
        return self.answer.lower() in passage.text.lower() and (
            not self.source or f"/{passage.source}".endswith(f"/{self.source}")
        )


@dataclass(frozen=True, slots=True)
class RerankCheck:
    """How well the right passages were ranked, over all questions.

    By the retriever and reranked: share of questions with a right passage first (`recall@1`) and among the first four
    (`recall@4`), and the mean reciprocal rank of the first right one (`mrr`).
    """

    questions: int
    found: int  # questions with a right passage among the nearest
    retriever: dict[str, float]
    reranked: dict[str, float]
    difference: float  # of the mean reciprocal rank
    interval: tuple[float, float]  # of the difference, 95 %, by bootstrap over questions

    @property
    def passed(self) -> bool:
        """Whether the whole interval is above zero."""
        return self.interval[0] > 0

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        low, high = self.interval
        better = "reranking is better" if low > 0 else "the retriever is better alone" if high < 0 else "undecided"
        first = f"a right passage is first for {self.reranked['recall@1']:.0%}, by the retriever alone for"
        return (
            f"{better}, on {self.questions} questions: {first} {self.retriever['recall@1']:.0%} "
            f"(reciprocal rank {self.difference:+.3f} [{low:+.3f}, {high:+.3f}])"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {**asdict(self), "passed": self.passed, "verdict": self.verdict}


def read_questions(path: Path) -> list[KnownQuestion]:
    """Read questions from JSON lines.

    Raises:
        QCFuseError: if the file cannot be read, has no question, or a line is no question with an answer or a source.
    """
    try:
        lines = [line for line in path.read_text("utf-8-sig").split("\n") if line.strip()]
        questions = [KnownQuestion.model_validate_json(line) for line in lines]
    except (OSError, UnicodeError, ValidationError):
        questions = []
    if not questions or not all(known.question.strip() and (known.answer or known.source) for known in questions):
        form = json.dumps({"question": "Who keeps the key?", "answer": "the council", "source": "mill.md"})
        raise QCFuseError(f"{path} has to be lines of questions, each with an answer, a source or both: {form}")
    return questions


def check_reranking(
    engine: FusionEngine,
    retriever: Retriever,
    questions: Sequence[KnownQuestion],
    progress: Callable[[int, int], None],
) -> RerankCheck:
    """Order the passages nearest to each question by the retriever, and by `FusionEngine.rerank` with its scores."""
    ranks = []
    for done, known in enumerate(questions, 1):
        index = retriever.index
        found = index.search(retriever.embed_questions([known.question]), NEAREST)
        passages, scores = [index.passages[row] for row, _ in found], [score for _, score in found]
        order = engine.rerank(known.question, [passage.text for passage in passages], retrieved=scores).order
        right = [known.is_right(passage) for passage in passages]
        ranks.append([_rank(right), _rank([right[place] for place in order])])
        progress(done, len(questions))
    reciprocal = 1 / np.array(ranks)  # 0 where there is none
    differences = reciprocal[:, 1] - reciprocal[:, 0]
    alone, reranked = (
        {"recall@1": float((of == 1).mean()), "recall@4": float((of >= 1 / 4).mean()), "mrr": float(of.mean())}
        for of in reciprocal.T
    )
    found_count = int((reciprocal[:, 0] > 0).sum())
    return RerankCheck(
        len(questions), found_count, alone, reranked, float(differences.mean()), mean_interval(differences.tolist())
    )


def _rank(right: Sequence[bool]) -> float:
    return right.index(True) + 1 if True in right else float("inf")
