"""Files of a KVShareArena checkout: frozen questions with checksums, and the wording of its prompts.

Source: github.com/xishi404/KVShareArena, `data/queryset` and `kvsharearena/assets`, release of 2026-09-11.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.questions import BadDataset
from benchmarks.runner import Record
from benchmarks.samples import Example
from qcfuse_rag.prompts.chat_template import ChatTemplate
from qcfuse_rag.prompts.template import PromptTemplate
from qcfuse_rag.runtime.language_model import LanguageModel

FILE_NAME = re.compile(r"(?P<subset>.+)_(?P<kind>n\d+|notes)")
CHECKSUMS = "sha256.json"
NO_THINKING = {"enable_thinking": False}
RECEIVER = "P_c"
"""The key of the answering model's system message in `prompts.json`."""


@dataclass(frozen=True, slots=True)
class Arena:
    """The questions of one frozen file, in its order, and the arena's prompt for them.

    `checked` says whether the digest of the file is the one in the folder's list of checksums.
    """

    dataset: str
    examples: tuple[Example, ...]
    template: PromptTemplate
    sha256: str
    checked: bool


def read_arena(path: Path) -> Arena:
    """Read a frozen file `{subset}_n100.jsonl` or `agent_reports/{subset}_notes.jsonl` in a checkout.

    The second has reports that other models wrote about the passages. They come without gold answers; those are in
    `{subset}_n100.jsonl` in the folder above. They are read as text: the arena's token ids are those of Qwen3.

    Raises:
        BadDataset: if the file cannot be read, is not the frozen one, or lacks a field.
    """
    name = FILE_NAME.fullmatch(path.stem)
    if name is None:
        raise BadDataset(f"{path.name} is not named like a file of the arena, such as hotpotqa_n100.jsonl")
    rows, (digest, checked) = _rows(path), _checksum(path)
    reports = name["kind"] == "notes"
    above = path.parent.parent / f"{name['subset']}_n100.jsonl"
    if reports:
        _checksum(above)
    gold = {row["_id"]: row.get("answers") for row in (_rows(above) if reports else rows)}
    assets = path.resolve().parents[3 if reports else 2] / "kvsharearena" / "assets"
    template, limit = _wording(assets, name["subset"])
    examples: dict[str, Example] = {}
    for row in rows:
        passages = [note["note_text"] for note in row["notes"]] if reports else row.get("chunks")
        answers = gold.get(row["_id"])
        if not passages or not answers or not row.get("input") or row["_id"] in examples:
            raise BadDataset(f"{path}, {row['_id']}: no question, passages or answers, or an id that is there twice")
        parts = (row["input"], tuple(passages), tuple(answers))
        examples[row["_id"]] = Example(*parts, id=row["_id"], dataset=path.stem, max_new_tokens=limit)
    return Arena(path.stem, tuple(examples.values()), template, digest, checked)


def _wording(folder: Path, subset: str) -> tuple[PromptTemplate, int]:
    """Read the prompt of a dataset and its limit of answer tokens.

    The system message is the answering model's. The dataset's prompt is the user message. Passages follow each other
    with nothing in between.
    """
    try:
        system = json.loads((folder / "prompts.json").read_bytes())[RECEIVER]
        config = json.loads((folder / "longbench_config.json").read_bytes())
        user, limit = config["dataset2prompt"][subset], int(config["dataset2maxlen"][subset])
        before, rest = user.split("{context}")
        between, after = rest.split("{input}")
    except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise BadDataset(f"the arena's wording for {subset} is not in {folder}: {error}") from error
    content = f"{_literal(before)}{{context}}{_literal(between)}{{question}}{_literal(after)}"
    return PromptTemplate((("system", _literal(system)), ("user", content)), chunk="{text}"), limit


def without_thinking(template: PromptTemplate, lm: LanguageModel) -> PromptTemplate:
    """Switch thinking off where the model's chat template can, as the arena does for Qwen3."""
    switches = NO_THINKING if NO_THINKING.keys() <= ChatTemplate(lm.tokenizer).variables else {}
    return replace(template, chat_template_kwargs=switches)


def _checksum(path: Path) -> tuple[str, bool]:
    """Return a file's digest, and whether a list of checksums in its folder or the one above confirms it."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    for folder in path.resolve().parents[:2]:
        if (folder / CHECKSUMS).is_file():
            expected = json.loads((folder / CHECKSUMS).read_bytes()).get(path.resolve().relative_to(folder).as_posix())
            if expected not in (digest, None):
                raise BadDataset(f"{path} is not the frozen file: sha256 {digest}, {CHECKSUMS} says {expected}")
            return digest, expected is not None
    return digest, False


def _rows(path: Path) -> list[Record]:
    try:
        return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise BadDataset(f"cannot read {path}: {error}") from error


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
