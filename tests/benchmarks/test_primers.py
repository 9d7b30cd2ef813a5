"""The study of primers warms the passages behind each primer and compares answers with full prefill's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.studies.primers import LENGTHS, primers
from benchmarks.studies.runner import to_command
from tests.support.passages import PASSAGES

NAMES = [f"{length} fixed" for length in LENGTHS] + ["2 of the library"]


def figures_of(model_folder: str, folder: Path, ratio: str) -> dict[str, dict[str, Any]]:
    """Run the study over two questions, each over two of three passages and one of its own."""
    data, out = folder / "library.jsonl", folder / "primers.json"
    questions = (("Who keeps the paint?", PASSAGES[:2]), ("When does it leave?", PASSAGES[1:]))
    lines = [
        {"id": question, "question": question, "answers": ["seven"], "passages": [*passages, f"Note: {question}"]}
        for question, passages in questions
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    app = typer.Typer()
    app.command()(to_command(primers))
    arguments = [str(data), "--model", model_folder, "--ratio", ratio, "--answer-tokens", "6", "--json", str(out)]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    figures: dict[str, dict[str, Any]] = json.loads(out.read_text())["figures"]
    return figures


@pytest.mark.slow
def test_each_primer_has_its_own_answers(model_folder: str, tmp_path: Path) -> None:
    figures = figures_of(model_folder, tmp_path, "0.1")
    assert list(figures) == NAMES
    assert all(len(values) == 2 for primer in figures.values() for values in primer.values())
    lengths = [figures[name]["tokens"][0] for name in NAMES[: len(LENGTHS)]]
    assert lengths == sorted(lengths)
    assert len({tuple(primer["answer_kl"]) for primer in figures.values()}) >= len(set(lengths))


@pytest.mark.slow
def test_no_primer_matters_where_everything_is_recomputed(model_folder: str, tmp_path: Path) -> None:
    figures = figures_of(model_folder, tmp_path, "1")
    assert max(kl for primer in figures.values() for kl in primer["answer_kl"]) < 1e-6
    assert all(primer["identical"] == [1.0, 1.0] for primer in figures.values())
