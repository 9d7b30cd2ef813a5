"""The runner: records are written as they come, a stopped run goes on, and what is done is shown."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks.runner import Report, Run, Table, execute
from qcfuse_rag.errors import QCFuseError
from tests.support.cli import Run as Command

CONDITIONS = {"model": "m", "size": 3}


def squares(stop: Callable[[int], None], calls: list[int], conditions: dict[str, Any] | None = None) -> Any:
    """Return a measurement of five steps, which are noted in `calls`; `stop` may end it before a step."""

    def measure(run: Run) -> None:
        run.begin({"command": "squares"}, CONDITIONS if conditions is None else conditions)
        for number in range(5):
            if ("square", number) not in run.records:
                stop(number)
                calls.append(number)
                run.add(("square", number), {"value": number**2})

    return measure


def report(run: Run) -> Report:
    rows = [[str(number), str(record["value"])] for (number,), record in run.of("square")]
    return Report({"total": sum(record["value"] for _, record in run.of("square"))}, [Table("t", ("n", "value"), rows)])


def never(number: int) -> None:
    pass


def interrupted(number: int) -> None:
    if number == 3:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_stopped_run_shows_what_is_done_and_goes_on_without_computing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, calls = tmp_path / "new" / "r.json", list[int]()
    with pytest.raises(KeyboardInterrupt):
        execute(Run("squares"), squares(interrupted, calls), report, str(out))
    assert (calls, json.loads(out.read_text())["total"]) == ([0, 1, 2], 5), "a table of what there is"
    assert "the same command goes on" in capsys.readouterr().err
    execute(Run("squares"), squares(never, calls), report, str(out))
    assert (calls, json.loads(out.read_text())["total"]) == ([0, 1, 2, 3, 4], 30)
    assert "| 4 | 16 |" in out.with_suffix(".md").read_text()


def test_a_killed_run_loses_no_more_than_its_unfinished_and_damaged_lines(tmp_path: Path) -> None:
    out, calls = tmp_path / "r.json", list[int]()
    execute(Run("squares"), squares(never, calls), report, str(out))
    partial = tmp_path / "r.partial.jsonl"
    lines = partial.read_bytes().splitlines(keepends=True)
    kept = [*lines[:3], lines[3][:9] + b"\n"]
    partial.write_bytes(b"".join(kept) + lines[4][:10])
    left = Run("", partial)
    left.read()
    assert (left.measures, report(left).summary) == ("squares", {"total": 1})
    execute(Run("squares"), squares(never, calls), report, str(out))
    assert calls == [0, 1, 2, 3, 4, 2, 3, 4]
    assert "damaged and left out: line 4" in json.loads(out.read_text())["notes"][0]
    assert partial.read_bytes().splitlines(keepends=True)[:4] == kept, "what is there is not written over"


def test_records_of_other_conditions_or_measurements_are_not_mixed(tmp_path: Path) -> None:
    out = str(tmp_path / "r.json")
    execute(Run("squares"), squares(never, []), report, out)
    with pytest.raises(QCFuseError, match=r"of other conditions .size was 3, is 4.*another --json"):
        execute(Run("squares"), squares(never, [], {**CONDITIONS, "size": 4}), report, out)
    with pytest.raises(QCFuseError, match="holds records of squares"):
        execute(Run("cubes"), squares(never, []), report, out)


@pytest.mark.parametrize("content", ["my notes\nof today\n", '{"measures": 1\n'])
def test_another_file_is_left_alone(content: str, tmp_path: Path) -> None:
    partial = tmp_path / "r.partial.jsonl"
    partial.write_text(content)
    with pytest.raises(QCFuseError, match="give another --json"):
        execute(Run("squares"), squares(never, []), report, str(tmp_path / "r.json"))
    assert partial.read_text() == content


def test_sides_take_turns_after_a_round_to_warm_up() -> None:
    calls: list[str] = []

    def side(name: str) -> Callable[[], dict[str, Any]]:
        return lambda: calls.append(name) or {"calls": len(calls)}  # type: ignore[func-returns-value]

    run = Run("turns")
    run.add(("step", "b", 0), {"calls": 0})
    run.take_turns(("step",), {("a",): side("a"), ("b",): side("b")}, 2)
    assert [key[1:] for key in run.records] == [("b", 0), ("a", 0), ("a", 1), ("b", 1)]
    assert calls == ["a", "b", "a", "a", "b"], "both warm up, and no call is made twice"
    run.take_turns(("step",), {("a",): side("a"), ("b",): side("b")}, 2)
    assert len(calls) == 5


def test_a_terminal_shows_the_columns_that_fit_and_takes_no_name_for_markup() -> None:
    table = Table(
        "t", ("method", "figure", "more"), [["auto[rows=question]", "1 [0, 2]", "x"]], narrow=("method", "figure")
    )
    shown = {}
    for width in (80, 200):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(table.for_terminal(width))
        shown[width] = console.export_text()
    assert "auto[rows=question]" in shown[80]
    assert ("[0, 2]" in shown[80], "more" in shown[80]) == (False, False)
    assert ("[0, 2]" in shown[200], "more" in shown[200]) == (True, True)
    assert "| auto[rows=question] | 1 [0, 2] | x |" in table.markdown()


def test_the_commands_are_listed_and_describe_themselves(run: Command) -> None:
    assert all(name in run.text("--help") for name in (*command.MEASUREMENTS, "show"))
    assert run("no-such-measurement")[0] == 2
    assert "--json" in run.text("warm", "--help")
