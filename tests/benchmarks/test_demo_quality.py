"""The study on the demonstration compares whole answers with full prefill's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.samples import Sample
from benchmarks.studies import demo_quality as study
from benchmarks.studies.runner import FULL_PREFILL, to_command
from qcfuse_rag import make_method
from qcfuse_rag.store.prefill_base import FRAMED
from tests.support.passages import PASSAGES, QUESTION


def test_answers_are_compared_along_full_prefills(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = Sample(QUESTION, tuple(PASSAGES), ("the council",))
    monkeypatch.setattr(study, "demo_questions", lambda top_k: [sample])
    monkeypatch.setattr(study, "METHODS", [FULL_PREFILL, make_method("reuse", base=FRAMED)])
    app = typer.Typer()
    app.command()(to_command(study.demo_quality))
    out = tmp_path / "result.json"
    CliRunner().invoke(app, ["--model", model_folder, "--json", str(out)], catch_exceptions=False)
    full, reuse = json.loads(out.read_text())["methods"]
    assert (full["identical"], full["top1"], full["same_first_token"]) == (1.0, 1.0, 1.0)
    assert full["answer_kl"] < 1e-6
    assert reuse["answer_kl"] > 1e-4
    assert reuse["identical"] == float(reuse["top1"] == 1.0)
