"""Questions to profile a model with: from a file, or from the demonstration's own corpus."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from qcfuse_rag.demo.assets import corpus, questions
from qcfuse_rag.errors import ProfileError
from qcfuse_rag.profile.occurrences import find_answers

EXPECTED = 'expected {"question": ..., "passages": [...], "answers": [...]} or {"input", "context", "answers"} a line'
NUMBERED = re.compile(r"^Passage \d+:[ \t]*\n", re.MULTILINE)
STEP = 5
"""From one question of the demonstration to the next, how much further on its distractors begin."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A question over passages.

    Attributes:
        question: the question.
        passages: what was retrieved, in order.
        answers: strings any of which is the answer; none where it is not known.
        supporting: indices of the passages that are known to be needed; empty where that is not known.
    """

    question: str
    passages: tuple[str, ...]
    answers: tuple[str, ...] = ()
    supporting: tuple[int, ...] = ()

    def with_distractors(self, count: int) -> Sample:
        """Keep the passages needed, in their order, and only the first `count` of the others.

        Where it is not known which are needed, those that an answer stands in are.
        """
        needed = set(self.supporting) or {
            index for index, passage in enumerate(self.passages) if find_answers(passage, self.answers)
        }
        others = islice((index for index in range(len(self.passages)) if index not in needed), count)
        kept = sorted(needed | set(others))
        return Sample(
            self.question,
            tuple(self.passages[index] for index in kept),
            self.answers,
            tuple(kept.index(index) for index in self.supporting),
        )


def demo_samples(distractors: int = 3) -> list[Sample]:
    """Return the demonstration's questions, each over the documents it needs and some of the others."""
    texts, samples = corpus(), []
    names = list(texts)
    for index, asked in enumerate(questions()):
        start = index * STEP % len(names)
        others = [name for name in names[start:] + names[:start] if name not in asked.documents]
        apart = max(1, len(others) // max(1, distractors))  # so that the evidence is not always first or last
        chosen = sorted([*asked.documents, *others[::apart][:distractors]])
        supporting = tuple(chosen.index(name) for name in asked.documents)
        samples.append(Sample(asked.question, tuple(texts[name] for name in chosen), asked.answers, supporting))
    return samples


def read_samples(path: Path) -> list[Sample]:
    """Read questions from a file of JSON lines.

    A line has `question`, `passages` (strings, or objects with `text` and perhaps `title`), `answers` (a string or
    several) if they are known, and perhaps `supporting` (indices of the passages needed). Lines in LongBench's format
    have `input` and `context` instead; a context is cut at its lines `Passage N:`, else at blank lines.

    Raises:
        ProfileError: naming the line that is not so.
    """
    samples = []
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"cannot read {path} ({error}); {EXPECTED}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                samples.append(_sample(json.loads(line)))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ProfileError(f"{path}, line {number}: {_reason(error)}; {EXPECTED}") from error
    return samples


def _sample(data: dict[str, Any]) -> Sample:
    if not isinstance(data, dict):
        raise TypeError("not an object")
    long_bench = "input" in data
    question = data["input" if long_bench else "question"]
    passages = _cut(data["context"]) if long_bench else tuple(_passage(item) for item in _list(data, "passages"))
    answers = data.get("answers") or ()
    answers = (answers,) if isinstance(answers, str) else tuple(answers)
    supporting = tuple(data.get("supporting") or ())
    if not isinstance(question, str) or not all(isinstance(answer, str) for answer in answers):
        raise TypeError("the question and its answers must be strings")
    if not passages:
        raise ValueError("there are no passages")
    if not all(type(index) is int and 0 <= index < len(passages) for index in supporting):
        raise ValueError(f"supporting must be indices of the {len(passages)} passages")
    return Sample(question, passages, answers, supporting)


def _list(data: dict[str, Any], name: str) -> Sequence[Any]:
    value = data[name]
    if not isinstance(value, list):
        raise TypeError(f"{name} must be a list")
    return value


def _passage(item: str | dict[str, str]) -> str:
    if isinstance(item, str):
        return item
    title = item.get("title")
    return f"{title}\n{item['text']}" if title else str(item["text"])


def _cut(context: str) -> tuple[str, ...]:
    parts = NUMBERED.split(context) if NUMBERED.search(context) else re.split(r"\n\s*\n", context)
    return tuple(part.strip() for part in parts if part.strip())


def _reason(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
