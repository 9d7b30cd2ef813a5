"""The studies: each runs by its name, and all share options, turns and JSON."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.__main__ import STUDIES
from benchmarks.speed.ceilings import take_turns
from benchmarks.studies.runner import StudyResult, StudyRun, to_command
from tests.support.cli import Run


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_a_command_with_a_json_file(name: str) -> None:
    if name == "kernel-floors":
        pytest.importorskip("triton")
    function = name.replace("-", "_")
    app = typer.Typer()
    app.command()(to_command(getattr(import_module(f"benchmarks.studies.{function}"), function)))
    result = CliRunner().invoke(app, ["--help"])
    assert (result.exit_code, "--json" in result.output) == (0, True)


def test_the_studies_are_listed(run: Run) -> None:
    assert "demo-quality" in run.text("--help")
    assert run("no-such-study")[0] != 0


def test_a_study_writes_json_as_it_goes_and_can_print_it(tmp_path: Path) -> None:
    out, kept = tmp_path / "result.json", []

    def counting(run: StudyRun, count: int = 2) -> StudyResult:
        run.keep({"count": 0})
        kept.append(json.loads(out.read_text())["count"])
        return StudyResult({"count": count}, ["[counted]"])

    app = typer.Typer()
    app.command()(to_command(counting))
    shown = CliRunner().invoke(app, ["--count", "3", "--json", str(out)])
    assert (shown.exit_code, shown.output.strip()) == (0, "[counted]")
    assert (kept, json.loads(out.read_text())["count"]) == ([0], 3)
    printed = CliRunner().invoke(app, ["--json", "-"])
    assert json.loads(printed.output)["count"] == 2


def test_sides_take_turns_after_a_round_to_warm_up() -> None:
    calls: list[str] = []
    sides = {name: lambda name=name: calls.append(name) or len(calls) for name in ("a", "b")}  # type: ignore[misc]
    assert take_turns(sides, 2) == {"a": [3, 5], "b": [4, 6]}
    assert calls == ["a", "b"] * 3
