"""The ladder compares every rung with full prefill on the same questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.studies.ladder import ladder
from benchmarks.studies.runner import to_command
from tests.support.passages import PASSAGES


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Return two questions over the three passages."""
    lines = [
        {"id": str(number), "question": question, "answers": [answer], "passages": PASSAGES}
        for number, (question, answer) in enumerate((("Who keeps the paint?", "the council"), ("When?", "seven")))
    ]
    path = tmp_path / "library.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
def test_everything_recomputed_is_full_prefill_and_less_is_not(
    library: Path, model_folder: str, tmp_path: Path
) -> None:
    app = typer.Typer()
    app.command()(to_command(ladder))
    out, plot = tmp_path / "ladder.json", tmp_path / "ladder.png"
    arguments = [str(library), "--model", model_folder, "--ratios", "0.1,1", "--residuals"]
    arguments += ["--answer-tokens", "6"]
    shown = CliRunner().invoke(app, [*arguments, "--json", str(out), "--plot", str(plot)], catch_exceptions=False)
    assert shown.exit_code == 0
    figures = json.loads(out.read_text())["figures"]
    kinds = ("", " residuals")
    assert list(figures) == [ratio + kind for ratio in ("0.1", "1") for kind in kinds]
    assert all(len(values) == 2 for rung in figures.values() for values in rung.values())
    for rung in (f"1{kind}" for kind in kinds):
        assert max(figures[rung]["answer_kl"]) < 1e-6
        assert figures[rung]["identical"] == [1.0, 1.0]
        assert figures[rung]["f1"] == figures[rung]["full_f1"]
    assert min(figures["0.1"]["answer_kl"]) > 1e-6
    assert len({tuple(figures[f"0.1{kind}"]["answer_kl"]) for kind in kinds}) == len(kinds)
    assert plot.stat().st_size > 1000
