"""Questions over passages with gold answers: from files of JSON lines, or from the demonstration corpus."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from qcfuse_rag.bundled import corpus, default_embedder, questions
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.library.index import nearest

EXPECTED = (
    'expected {"question": ..., "passages": [text or {"title", "text"}, ...], "answers": [...]} or {"input": ..., '
    '"context": text or [text, ...], "answers": [...]} a line'
)
NUMBERED = re.compile(r"^Passage \d+:[ \t]*\n", re.MULTILINE)
STEP = 5  # offset of a question's first distractor from that of the question before it
JUDGEMENTS = {"yes", "no"}  # answers that judge the passages and do not quote them


class BadDataset(QCFuseError):
    """A question file cannot be read, or a line cannot be used; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Example:
    """A question over passages with gold answers; its id is unique within its dataset.

    `supporting` are the indices of the passages with the answer, if known. With `needs_all` a right answer contains all
    answers, as in RULER's tasks; else any of them is right.
    """

    question: str
    passages: tuple[str, ...]
    answers: tuple[str, ...]
    supporting: tuple[int, ...] = ()
    id: str = ""
    dataset: str = ""
    needs_all: bool = False
    max_new_tokens: int = 32

    @property
    def gold(self) -> str:
        """The answer to measure the likelihood of: the first answer, or all of them joined if all are needed."""
        return ", ".join(self.answers) if self.needs_all else self.answers[0]

    def with_distractors(self, count: int) -> Example:
        """Keep the needed passages, else those that contain an answer, and the first `count` others, in their order."""
        containing = (i for i, passage in enumerate(self.passages) if find_answers(passage, self.answers))
        needed = set(self.supporting or containing)
        others = islice((index for index in range(len(self.passages)) if index not in needed), count)
        return self.keeping(sorted(needed | set(others)))

    def keeping(self, kept: list[int]) -> Example:
        """Keep some passages, by their indices."""
        supporting = tuple(kept.index(index) for index in self.supporting if index in kept)
        return replace(self, passages=tuple(self.passages[index] for index in kept), supporting=supporting)


def find_answers(text: str, answers: Iterable[str]) -> list[tuple[int, int]]:
    """Find all occurrences of the answers as whole words: ascending ranges `(start, stop)`, `stop` exclusive.

    Case and the kind of white space do not matter. In scripts without spaces, such as Chinese, every character may
    begin or end a word. Empty strings, `yes` and `no` are never found. Ranges of different answers may overlap.
    """
    spans = set()
    for answer in answers:
        pattern = r"\s+".join(map(re.escape, answer.split()))
        if pattern and answer.strip().lower() not in JUDGEMENTS:
            for match in re.finditer(f"(?=({pattern}))", text, re.IGNORECASE):  # matches may overlap
                if not _inside_word(text, match.start(1)) and not _inside_word(text, match.end(1)):
                    spans.add(match.span(1))
    return sorted(spans)


def _inside_word(text: str, index: int) -> bool:
    around = text[index - 1 : index + 1] if 0 < index < len(text) else " "
    return all(letter.isalnum() and unicodedata.east_asian_width(letter) not in "WF" for letter in around)


def demo_examples(distractors: int = 3) -> list[Example]:
    """Return the demonstration's questions, each over the documents it needs and some other documents."""
    texts, examples = corpus(), []
    names = list(texts)
    for index, question in enumerate(questions()):
        start = index * STEP % len(names)
        others = [name for name in names[start:] + names[:start] if name not in question.documents]
        step = max(1, len(others) // max(1, distractors))  # so that the evidence is not always first or last
        chosen = sorted([*question.documents, *others[::step][:distractors]])
        supporting = tuple(chosen.index(name) for name in question.documents)
        passages = tuple(texts[name] for name in chosen)
        examples.append(_demo(index, question, passages, supporting))
    return examples


def retrieved_examples(top_k: int) -> list[Example]:
    """Return the demonstration's questions, each over the `top_k` documents that MiniLM finds nearest."""
    from qcfuse_rag.library.embedder import Embedder

    texts = list(corpus().values())
    embed = Embedder(default_embedder())
    vectors = embed(texts)
    asked = enumerate(questions())
    found = ((index, question, nearest(vectors, embed([question.question])[0], top_k)) for index, question in asked)
    return [_demo(index, question, tuple(texts[i] for i in documents), ()) for index, question, documents in found]


def _demo(index: int, question: Any, passages: tuple[str, ...], supporting: tuple[int, ...]) -> Example:
    known = {"question": question.question, "answers": question.answers, "supporting": supporting}
    return Example(**known, passages=passages, id=str(index + 1), dataset="demo")


def read_dataset(path: Path, *, size: int | None = None) -> list[Example]:
    """Read the first `size` questions of a file of JSON lines, all of them if None.

    There are three layouts. This package's has `question`, `passages` (strings, or objects with `text` and perhaps
    `title`), `answers` (a string or several), and perhaps `supporting` (indices of the needed passages) and `id`. The
    layout of the QCFuse release has `input` and `context`, a list of passages. LongBench's has one string as `context`,
    which is cut at its lines `Passage N:`, else at blank lines. A passage is its title, a line break and its text;
    blank answers are ignored. The id of a question without one is its line number.
    """
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadDataset(f"cannot read {path} ({error}); name a file of JSON lines in UTF-8") from error
    examples: dict[str, Example] = {}
    # Only a line feed ends a line: `splitlines` also cuts at characters that stand inside JSON strings.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            example = _example(json.loads(line), number, path.stem)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"`{error.args[0]}` is missing" if isinstance(error, KeyError) else error
            raise BadDataset(f"{path}, line {number}: {reason}; {EXPECTED}") from error
        if example.id in examples:
            raise BadDataset(f"{path}, line {number}: the id {example.id!r} is there twice; give it another, or none")
        examples[example.id] = example
        if len(examples) == size:
            break
    if not examples:
        raise BadDataset(f"{path} holds no question")
    return list(examples.values())


def _example(record: Mapping[str, Any], number: int, dataset: str) -> Example:
    parts = _passages(record)
    question = record["input" if record.get("passages") is None else "question"]
    answers, supporting, name = record.get("answers") or [], record.get("supporting") or [], record.get("id")
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(question, str):
        raise TypeError("the question must be a string")
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise TypeError("`answers` must be a string or a list of strings")
    if not any(answer.strip() for answer in answers):
        raise ValueError("there is no gold answer; give `answers`, or remove the line")
    if not parts:
        raise ValueError("there are no passages")
    if not isinstance(supporting, list) or not set(supporting) <= set(range(len(parts))):
        raise ValueError(f"`supporting` must be indices of the {len(parts)} passages")
    return Example(
        question=question,
        passages=tuple(f"{title}\n{text}" if title else text for title, text in parts),
        answers=tuple(answer for answer in answers if answer.strip()),
        supporting=tuple(sorted(set(supporting))),
        id=str(number if name is None else name),
        dataset=dataset,
    )


def _passages(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    name = "context" if record.get("passages") is None and "context" in record else "passages"
    items = record[name]
    if name == "context" and isinstance(items, str):
        cut = NUMBERED.split(items) if NUMBERED.search(items) else re.split(r"\n\s*\n", items)
        items = [part.strip() for part in cut if part.strip()]
    if not isinstance(items, list):
        raise TypeError(f"`{name}` must be a list")
    parts = [(item.get("title") or "", item["text"]) if isinstance(item, dict) else ("", item) for item in items]
    if not all(isinstance(part, str) for pair in parts for part in pair):
        raise TypeError("a passage must be a string, or an object with strings as `text` and `title`")
    return parts


def passage_texts(folder: Path) -> Iterator[str]:
    """Yield the texts, without titles, of all passages in a folder's JSON lines; other lines are skipped."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text("utf-8", errors="replace").split("\n"):
            try:
                parts = _passages(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                continue
            yield from (text for _, text in parts)
