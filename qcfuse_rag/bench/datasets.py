"""Questions with passages and gold answers, read from JSON lines in either of two layouts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qcfuse_rag.errors import QCFuseError


class BadDataset(QCFuseError):
    """A dataset is missing, or a record of it cannot be used; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Example:
    """One question.

    Attributes:
        id: unique within the dataset.
        dataset: its name.
        question: as it is asked.
        passages: texts in the order they are given to the model.
        answers: gold answers, any of which is right; all of which are wanted if `needs_all`.
        supporting: indices of the passages that hold the answer; empty if the record does not say.
        needs_all: the answers are parts of one answer, as in RULER's tasks.
        max_new_tokens: most tokens of the generated answer.
    """

    id: str
    dataset: str
    question: str
    passages: tuple[str, ...]
    answers: tuple[str, ...]
    supporting: tuple[int, ...] = ()
    needs_all: bool = False
    max_new_tokens: int = 32

    @property
    def gold(self) -> str:
        """The answer whose likelihood is measured: the first one, or all of them if all are needed."""
        return ", ".join(self.answers) if self.needs_all else self.answers[0]


def read_dataset(path: Path, *, size: int | None = None) -> list[Example]:
    """Read the first `size` questions of a file of JSON lines, all of them if None.

    A record is either `{"id", "question", "answers": [...], "passages": [{"title", "text"}], "supporting": [...]}`, or
    the layout of the QCFuse release, `{"input", "context": [...], "answers"}`. A passage is its title, a line break
    and its text. Without an id the line number is taken.

    Raises:
        BadDataset: if the file cannot be read, holds no question, or a record is not one.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadDataset(f"cannot read {path} ({error}); give the folder of {path.name} as --data-dir") from error
    examples: list[Example] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if len(examples) == size:
            break
        if not line.strip():
            continue
        try:
            example = _example(json.loads(line), path.stem, number)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadDataset(f"{path}, line {number}: {_what(error)}") from error
        if example.id in seen:
            raise BadDataset(f"{path}, line {number}: the id {example.id!r} is there twice")
        seen.add(example.id)
        examples.append(example)
    if not examples:
        raise BadDataset(f"{path} holds no question")
    return examples


def with_distractors(example: Example, count: int) -> Example:
    """Keep the passages that hold the answer and the first `count` others, in their order.

    A question that does not say which passages those are stays as it is.
    """
    if not example.supporting:
        return example
    gold = set(example.supporting)
    others = [i for i in range(len(example.passages)) if i not in gold][:count]
    kept = sorted(gold | set(others))
    passages = tuple(example.passages[i] for i in kept)
    return replace(example, passages=passages, supporting=tuple(kept.index(i) for i in sorted(gold)))


def first_passages(example: Example, count: int) -> Example:
    """Keep the first `count` passages, as the QCFuse release does by its `--topk`."""
    supporting = tuple(i for i in example.supporting if i < count)
    return replace(example, passages=example.passages[:count], supporting=supporting)


def passage_texts(folder: Path) -> Iterator[str]:
    """Yield the texts, without titles, of all passages of the JSON lines in a folder; files that are not data go by."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text("utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
                passages = record.get("passages", record.get("context", ()))
                texts = [p["text"] if isinstance(p, dict) else p for p in passages]
            except (ValueError, TypeError, KeyError, AttributeError):
                continue
            yield from (text for text in texts if isinstance(text, str))


def _example(record: Any, dataset: str, number: int) -> Example:
    if not isinstance(record, dict):
        raise TypeError("a record must be a JSON object")
    if "passages" in record:
        question, passages = record["question"], [_passage(p) for p in record["passages"]]
    elif "context" in record:
        question, passages = record["input"], [_text(p, "a passage of `context`") for p in record["context"]]
    else:
        raise KeyError("passages")
    answers = record["answers"]
    answers = [answers] if isinstance(answers, str) else [_text(answer, "an answer") for answer in answers]
    if not answers or not any(answer.strip() for answer in answers):
        raise ValueError("there is no gold answer")
    if not passages:
        raise ValueError("there is no passage")
    supporting = _indices(record.get("supporting") or (), len(passages))
    name = str(record.get("id", number))
    return Example(name, dataset, _text(question, "the question"), tuple(passages), tuple(answers), supporting)


def _passage(passage: Any) -> str:
    title, text = passage.get("title") or "", _text(passage["text"], "the text of a passage")
    return f"{title}\n{text}" if title else text


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a string, not {type(value).__name__}")
    return value


def _indices(values: Sequence[Any], count: int) -> tuple[int, ...]:
    if any(type(i) is not int or not 0 <= i < count for i in values):
        raise ValueError(f"`supporting` must hold indices of the {count} passages, not {list(values)}")
    return tuple(sorted(set(values)))


def _what(error: Exception) -> str:
    if isinstance(error, KeyError):
        layouts = "{id, question, answers, passages: [{title, text}]} or {input, context, answers}"
        return f"no {error}; a record is {layouts}"
    return f"not a record of a dataset: {error}"
