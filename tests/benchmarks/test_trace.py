"""Counting what recorded chat requests would reuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies.runner import StudyRun
from benchmarks.studies.trace import trace
from qcfuse_rag.errors import QCFuseError
from tests.support.passages import PASSAGES, QUESTION

SYSTEM = {"role": "system", "content": "You look after the boats of a small harbour and answer in one sentence."}


def asked(*passages: str) -> dict[str, str]:
    documents = "".join(f"[Document {number}: {text}]\n\n" for number, text in enumerate(passages, 1))
    return {"role": "user", "content": f"Read these.\n\n{documents}Question: {QUESTION}"}


def write(path: Path, *conversations: list[dict[str, str]]) -> None:
    records: list[dict[str, Any]] = [{"type": "request", "body": {"messages": turns}} for turns in conversations]
    path.write_text("".join(json.dumps(record) + "\n" for record in [*records, {"type": "response", "body": {}}]))


@pytest.mark.slow
def test_prefix_system_prefix_and_passages_are_counted_once_each(tmp_path: Path, model_folder: str) -> None:
    first = [SYSTEM, asked(PASSAGES[0], PASSAGES[1])]
    second = [*first, {"role": "assistant", "content": "It is old."}, asked(PASSAGES[1], PASSAGES[0])]
    write(tmp_path / "boats_1.jsonl", first, second)
    write(tmp_path / "boats_2.jsonl", [SYSTEM, asked(PASSAGES[2])])
    write(tmp_path / "mills_1.jsonl", [{"role": "user", "content": QUESTION}])
    data = trace(StudyRun("-"), tmp_path, model=model_folder).data
    boats, mills = data["corpora"]["boats"], data["corpora"]["mills"]
    assert (data["sessions"], boats["requests"], mills["requests"]) == (3, 3, 1)
    assert boats["prefix"] > 0
    assert boats["system"] > 0, "the second session begins as the first"
    assert boats["passages"] > boats["prefix"] / 2
    assert boats["blocks"] == 0, "no passage has a whole block"
    assert boats["prefix"] + boats["system"] + boats["passages"] < boats["tokens"]
    assert mills["prefix"] == mills["system"] == mills["passages"] == 0
    assert data["corpora"]["all"]["tokens"] == boats["tokens"] + mills["tokens"]


def test_a_folder_without_sessions_is_an_error(tmp_path: Path, model_folder: str) -> None:
    with pytest.raises(QCFuseError, match="no session"):
        trace(StudyRun("-"), tmp_path, model=model_folder)
