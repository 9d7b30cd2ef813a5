"""Questions over passages: from files of JSON lines, or from the demonstration corpus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.samples import Example, Sample
from qcfuse_rag.bundled import corpus, default_embedder, questions
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.library.index import nearest

EXPECTED = (
    'expected {"question": ..., "passages": [text or {"title", "text"}, ...], "answers": [...]} or {"input": ..., '
    '"context": text or [text, ...], "answers": [...]} a line'
)
NUMBERED = re.compile(r"^Passage \d+:[ \t]*\n", re.MULTILINE)
STEP = 5
"""Offset of a question's first distractor from that of the question before it."""


class BadDataset(QCFuseError):
    """A question file cannot be read, or a line cannot be used; the message names file and line."""


def demo_samples(distractors: int = 3) -> list[Sample]:
    """Return the demonstration's questions, each over the documents it needs and some other documents."""
    texts, samples = corpus(), []
    names = list(texts)
    for index, question in enumerate(questions()):
        start = index * STEP % len(names)
        others = [name for name in names[start:] + names[:start] if name not in question.documents]
        step = max(1, len(others) // max(1, distractors))  # so that the evidence is not always first or last
        chosen = sorted([*question.documents, *others[::step][:distractors]])
        supporting = tuple(chosen.index(name) for name in question.documents)
        passages = tuple(texts[name] for name in chosen)
        samples.append(Sample(question.question, passages, question.answers, supporting))
    return samples


def demo_questions(top_k: int) -> list[Example]:
    """Return the demonstration's questions, each over the `top_k` documents that MiniLM finds nearest."""
    from qcfuse_rag.library.embedder import Embedder

    texts = list(corpus().values())
    embed = Embedder(default_embedder())
    vectors = embed(texts)
    return [
        Example(
            question.question,
            tuple(texts[i] for i in nearest(vectors, embed([question.question])[0], top_k)),
            question.answers,
            id=str(number),
            dataset="demo",
        )
        for number, question in enumerate(questions(), 1)
    ]


def read_samples(path: Path) -> list[Sample]:
    """Read all questions of a file of JSON lines, see `read_lines`."""
    return [sample for _, _, sample in read_lines(path)]


def read_lines(path: Path) -> Iterator[tuple[int, str | None, Sample]]:
    """Yield each question of a file of JSON lines with its line number, from 1, and its id in the file, if any.

    There are three layouts; reading stops where the caller stops.

    This package's layout has `question`, `passages` (strings, or objects with `text` and perhaps `title`), `answers` (a
    string or several) if they are known, and perhaps `supporting` (indices of the needed passages) and `id`. The layout
    of the QCFuse release has `input` and `context`, a list of passages. LongBench's layout has one string as `context`,
    which is cut at its lines `Passage N:`, else at blank lines. A passage is its title, a line break and its text;
    blank answers are ignored.
    """
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadDataset(f"cannot read {path} ({error}); name a file of JSON lines in UTF-8") from error
    # Only a line feed ends a line: `splitlines` also cuts at characters that stand inside JSON strings.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise TypeError("not a JSON object")
            name, sample = record.get("id"), _sample(record)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"`{error.args[0]}` is missing" if isinstance(error, KeyError) else error
            raise BadDataset(f"{path}, line {number}: {reason}; {EXPECTED}") from error
        yield number, None if name is None else str(name), sample


def passage_parts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return title and text of each passage of a record; a missing title is empty."""
    name = "context" if record.get("passages") is None and "context" in record else "passages"
    items = record[name]
    if name == "context" and isinstance(items, str):
        items = _cut(items)
    if not isinstance(items, list):
        raise TypeError(f"`{name}` must be a list")
    return [_part(item) for item in items]


def _sample(record: Mapping[str, Any]) -> Sample:
    parts = passage_parts(record)
    question = record["input" if record.get("passages") is None else "question"]
    answers = record.get("answers") or ()
    answers = [answers] if isinstance(answers, str) else answers
    supporting = record.get("supporting") or ()
    if not isinstance(question, str):
        raise TypeError("the question must be a string")
    if not isinstance(answers, list | tuple) or not all(isinstance(answer, str) for answer in answers):
        raise TypeError("`answers` must be a string or a list of strings")
    if not parts:
        raise ValueError("there are no passages")
    if not isinstance(supporting, list | tuple) or any(
        type(index) is not int or not 0 <= index < len(parts) for index in supporting
    ):
        raise ValueError(f"`supporting` must be indices of the {len(parts)} passages")
    return Sample(
        question,
        tuple(f"{title}\n{text}" if title else text for title, text in parts),
        tuple(answer for answer in answers if answer.strip()),
        tuple(sorted(set(supporting))),
    )


def _part(item: Any) -> tuple[str, str]:
    title, text = (item.get("title") or "", item["text"]) if isinstance(item, dict) else ("", item)
    if not isinstance(title, str) or not isinstance(text, str):
        raise TypeError("a passage must be a string, or an object with strings as `text` and `title`")
    return title, text


def _cut(context: str) -> list[str]:
    parts = NUMBERED.split(context) if NUMBERED.search(context) else re.split(r"\n\s*\n", context)
    return [part.strip() for part in parts if part.strip()]


def read_dataset(path: Path, *, size: int | None = None) -> list[Example]:
    """Read the first `size` questions of a file of JSON lines, all of them if None; each needs a gold answer.

    For the layouts of a line see `read_lines`. The id of a question without one is its line number.
    """
    examples: list[Example] = []
    seen: set[str] = set()
    for number, line_id, sample in read_lines(path) if size != 0 else ():
        name = str(number) if line_id is None else line_id
        if not sample.answers:
            raise BadDataset(f"{path}, line {number}: there is no gold answer; give `answers`, or remove the line")
        if name in seen:
            raise BadDataset(f"{path}, line {number}: the id {name!r} is there twice; give it another, or none")
        seen.add(name)
        parts = (sample.question, sample.passages, sample.answers, sample.supporting)
        examples.append(Example(*parts, id=name, dataset=path.stem))
        if len(examples) == size:
            break
    if not examples:
        raise BadDataset(f"{path} holds no question")
    return examples


def first_passages(example: Example, count: int) -> Example:
    """Keep the first `count` passages, as `--topk` of the QCFuse release does."""
    supporting = tuple(i for i in example.supporting if i < count)
    return replace(example, passages=example.passages[:count], supporting=supporting)


def passage_texts(folder: Path) -> Iterator[str]:
    """Yield the texts, without titles, of all passages in a folder's JSON lines; other lines are skipped."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text("utf-8", errors="replace").split("\n"):
            try:
                parts = passage_parts(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                continue
            yield from (text for _, text in parts)
