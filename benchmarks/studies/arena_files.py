"""Files of a KVShareArena checkout: frozen questions with checksums, and the wording of its prompts.

Source: github.com/xishi404/KVShareArena, `data/queryset` and `kvsharearena/assets`, release of 2026-09-11.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.questions import BadDataset
from benchmarks.samples import Example
from qcfuse_rag.prompts.template import PromptTemplate

FILE_NAME = re.compile(r"(?P<subset>.+)_(?P<kind>n\d+|notes)")
CHECKSUMS = "sha256.json"
RECEIVER = "P_c"
"""The key of the answering model's system message in `prompts.json`."""


@dataclass(frozen=True, slots=True)
class ArenaQuestions:
    """The questions of one frozen file, in its order.

    Attributes:
        subset: the dataset's name, such as `hotpotqa`.
        track: `re` for retrieved passages, `ar` for reports that other models wrote about them.
        examples: the questions; their passages are the arena's chunks or reports, unchanged.
        sha256: digest of the file.
        checked: whether the digest is the one in the folder's list of checksums; False without a list.
    """

    subset: str
    track: str
    examples: tuple[Example, ...]
    sha256: str
    checked: bool


@dataclass(frozen=True, slots=True)
class Wording:
    """The arena's prompt for a dataset, and its limit of answer tokens."""

    template: PromptTemplate
    max_new_tokens: int


def read_questions(path: Path) -> ArenaQuestions:
    """Read a frozen file `{subset}_n100.jsonl` or `agent_reports/{subset}_notes.jsonl`.

    Reports come without gold answers; those are in `{subset}_n100.jsonl` in the folder above. Reports are read as
    text: the arena's token ids are those of Qwen3, and other models have other ids.

    Raises:
        BadDataset: if the file cannot be read, is not the frozen one, or lacks a field.
    """
    name = FILE_NAME.fullmatch(path.stem)
    if name is None:
        raise BadDataset(f"{path.name} is not named like a file of the arena, such as hotpotqa_n100.jsonl")
    content, (digest, checked) = _read(path), _checksum(path)
    if name["kind"] != "notes":
        examples = _examples(path, content, _passages, lambda row: row["answers"])
        return ArenaQuestions(name["subset"], "re", examples, digest, checked)
    above = path.parent.parent / f"{name['subset']}_n100.jsonl"
    _checksum(above)
    gold = {row["_id"]: row["answers"] for _, row in _rows(above, _read(above))}
    examples = _examples(path, content, _reports, lambda row: gold[row["_id"]])
    return ArenaQuestions(name["subset"], "ar", examples, digest, checked)


def read_wording(folder: Path, subset: str) -> Wording:
    """Read the prompt of a dataset from `prompts.json` and `longbench_config.json` in a folder.

    The system message is the answering model's. The dataset's prompt is the user message. Passages follow each other
    with nothing in between.

    Raises:
        BadDataset: if a file cannot be read or does not know the dataset.
    """
    try:
        system = json.loads(_read(folder / "prompts.json"))[RECEIVER]
        config = json.loads(_read(folder / "longbench_config.json"))
        user, limit = config["dataset2prompt"][subset], int(config["dataset2maxlen"][subset])
        before, rest = user.split("{context}")
        between, after = rest.split("{input}")
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise BadDataset(f"the arena's wording for {subset} is not in {folder}: {error}") from error
    content = f"{_literal(before)}{{context}}{_literal(between)}{{question}}{_literal(after)}"
    return Wording(PromptTemplate((("system", _literal(system)), ("user", content)), chunk="{text}"), limit)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadDataset(f"cannot read {path}: {error}") from error


def _checksum(path: Path) -> tuple[str, bool]:
    """Return a file's digest, and whether a list of checksums in its folder or the one above confirms it.

    Raises:
        BadDataset: if a list has another digest for the file.
    """
    digest = hashlib.sha256(_read(path)).hexdigest()
    for folder in path.resolve().parents[:2]:
        if (folder / CHECKSUMS).is_file():
            expected = json.loads(_read(folder / CHECKSUMS)).get(path.resolve().relative_to(folder).as_posix())
            if expected not in (digest, None):
                raise BadDataset(f"{path} is not the frozen file: sha256 {digest}, {CHECKSUMS} says {expected}")
            return digest, expected is not None
    return digest, False


def _rows(path: Path, content: bytes) -> list[tuple[int, Mapping[str, Any]]]:
    rows: list[tuple[int, Mapping[str, Any]]] = []
    for number, line in enumerate(content.decode("utf-8").split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise BadDataset(f"{path}, line {number}: {error}") from error
            rows.append((number, row))
    return rows


def _examples(
    path: Path,
    content: bytes,
    passages: Callable[[Mapping[str, Any]], list[str]],
    answers: Callable[[Mapping[str, Any]], list[str]],
) -> tuple[Example, ...]:
    examples: dict[str, Example] = {}
    for number, row in _rows(path, content):
        try:
            example = Example(row["input"], tuple(passages(row)), tuple(answers(row)), id=row["_id"], dataset=path.stem)
        except (KeyError, TypeError) as error:
            raise BadDataset(f"{path}, line {number}: {error} is missing or has another type") from error
        if not example.passages or not example.answers or example.id in examples:
            raise BadDataset(f"{path}, line {number}: no passages, no answers, or an id that is there twice")
        examples[example.id] = example
    return tuple(examples.values())


def _passages(row: Mapping[str, Any]) -> list[str]:
    chunks: list[str] = row["chunks"]
    return chunks


def _reports(row: Mapping[str, Any]) -> list[str]:
    return [note["note_text"] for note in row["notes"]]


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
