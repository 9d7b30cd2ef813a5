"""Questions with passages and gold answers: those of a file, as the bench asks them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from qcfuse_rag.evaluation.profile.samples import BadDataset, passage_parts, read_lines
from qcfuse_rag.verification.samples import Example


def read_dataset(path: Path, *, size: int | None = None) -> list[Example]:
    """Read the first `size` questions of a file of JSON lines, all of them if None.

    For the layouts of a line see `evaluation.profile.samples.read_lines`. Without an id the line number is taken.

    Raises:
        BadDataset: if the file cannot be read, holds no question, or a line is not one with an answer.
    """
    examples: list[Example] = []
    seen: set[str] = set()
    lines = read_lines(path)
    while len(examples) != size and (line := next(lines, None)) is not None:
        sample, name = line.sample, line.id if line.id is not None else str(line.number)
        if not sample.answers:
            raise BadDataset(f"{path}, line {line.number}: there is no gold answer; give `answers`, or remove the line")
        if name in seen:
            raise BadDataset(f"{path}, line {line.number}: the id {name!r} is there twice; give it another, or none")
        seen.add(name)
        examples.append(
            Example(sample.question, sample.passages, sample.answers, sample.supporting, id=name, dataset=path.stem)
        )
    if not examples:
        raise BadDataset(f"{path} holds no question")
    return examples


def first_passages(example: Example, count: int) -> Example:
    """Keep the first `count` passages, as the QCFuse release does by its `--topk`."""
    supporting = tuple(i for i in example.supporting if i < count)
    return replace(example, passages=example.passages[:count], supporting=supporting)


def passage_texts(folder: Path) -> Iterator[str]:
    """Yield the texts, without titles, of all passages of the JSON lines in a folder; lines that are not data go by."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text("utf-8", errors="replace").split("\n"):
            try:
                parts = passage_parts(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                continue
            yield from (text for _, text in parts)
