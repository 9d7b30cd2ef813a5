"""The runner of all measurements: records are written as they come, a stopped run goes on, tables show what is done."""

from __future__ import annotations

import json
import os
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from rich.markup import escape
from rich.table import Table as RichTable

from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.cli.console import ERR, OUT, print_json, print_line, progress_bar
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.models.fingerprint import digest
from qcfuse_rag.runtime.language_model import LanguageModel

Key = tuple[str | float | None, ...]
Record = dict[str, Any]
BEGINNING = b'{"measures": '
WIDE_COLUMNS = 200  # least width of a terminal that fits all columns of a table
WORDS = ("set-up", "method", "base", "tier", "side", "case", "entry", "operation")  # columns of text, not of figures
PRINT_JSON = "-"


@dataclass(frozen=True, slots=True)
class Table:
    """A table for the terminal and for Markdown; a terminal that is not wide gets the columns in `narrow`, if any."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    narrow: Sequence[str] = ()

    def markdown(self) -> str:
        """Return the table with its title as Markdown."""
        lines = [f"| {' | '.join(cells)} |" for cells in (self.columns, *self.rows)]
        return "\n".join([f"## {self.title}", "", lines[0], "|" + "---|" * len(self.columns), *lines[1:]])

    def for_terminal(self, width: int) -> RichTable:
        """Return the table with the columns that fit; a method's name with parameters may wrap, figures never do."""
        shown = [i for i, name in enumerate(self.columns) if width >= WIDE_COLUMNS or name in (self.narrow or [name])]
        table = RichTable(title=escape(self.title))
        for name in (self.columns[i] for i in shown):
            side: Literal["left", "right"] = "left" if name in WORDS else "right"
            fold = name in WORDS
            table.add_column(name, justify=side, no_wrap=not fold, overflow="fold" if fold else "ellipsis")
        for row in self.rows:
            cells = [row[i] if width >= WIDE_COLUMNS else row[i].partition(" [")[0] for i in shown]
            table.add_row(*map(escape, cells))  # parameters stand in brackets, as markup does
        return table


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a measurement: plain data for JSON, tables, and sentences below them."""

    summary: Mapping[str, Any]
    tables: Sequence[Table]
    notes: Sequence[str] = ()


@dataclass(slots=True)
class Run:
    """One run of a measurement: its records so far, those of earlier runs into the same file included.

    A file's first line says what it measures and on which conditions; each other line is a record with its key. An
    unreadable line is left out and counted, and an unfinished last one is cut off. Without a path all is in memory.
    """

    measures: str
    path: Path | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    conditions: Mapping[str, Any] = field(default_factory=dict)
    records: dict[Key, Record] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    progress: Callable[[int, int], None] = lambda *_: None

    def begin(self, about: Mapping[str, Any], conditions: Mapping[str, Any]) -> None:
        """Say what is measured, before the first record; go on with the file's records, which must be of the same."""
        self.about, self.conditions = about, json.loads(json.dumps(conditions, default=str))
        if self.path is None:
            return
        whole_bytes = self.read(self.conditions) if self.path.exists() else 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if whole_bytes:
            os.truncate(self.path, whole_bytes)  # cut off a line that a killed process left unfinished
        else:
            self.path.unlink(missing_ok=True)
            self._write({"measures": self.measures, "conditions": self.conditions, "about": about})

    def add(self, key: Key, record: Mapping[str, Any]) -> None:
        """Keep a record and write it."""
        self.records[key] = {**record}
        self._write({"key": key, **record})

    def of(self, kind: str) -> list[tuple[Key, Record]]:
        """Return the records whose keys begin with a word, each with the rest of its key."""
        return [(key[1:], record) for key, record in self.records.items() if key[0] == kind]

    def take_turns(self, step: Key, sides: Mapping[Key, Callable[[], Mapping[str, Any]]], rounds: int) -> None:
        """Call every side once a round and record what it returns, by step, side and round.

        A first round warms up and is not recorded. Calls that an earlier run recorded are left out.
        """
        calls = [((*step, *name, turn), call) for turn in range(rounds) for name, call in sides.items()]
        missing = [(key, call) for key, call in calls if key not in self.records]
        for call in sides.values() if missing else ():
            call()
        for key, call in missing:
            self.add(key, call())

    def read(self, expected: Mapping[str, Any] | None = None) -> int:
        """Read the file; return the number of bytes in whole lines. Without expected conditions, any will do."""
        assert self.path is not None
        *lines, unfinished = self.path.read_bytes().split(b"\n")
        damaged = []
        if not (lines or [unfinished])[0].startswith(BEGINNING[: len(unfinished) if not lines else None]):
            raise QCFuseError(f"{self.path} holds no records of a measurement; give another --json")
        for number, line in enumerate(lines, start=1):
            try:
                entry = dict(json.loads(line))
                if number == 1:
                    self._check(entry, expected)
                else:
                    self.records[tuple(entry.pop("key"))] = entry
            except (ValueError, TypeError, KeyError) as error:
                if number == 1:
                    raise QCFuseError(f"{self.path} cannot be read: {error}; give another --json") from error
                damaged.append(str(number))
        if damaged:
            self.notes.append(f"{self.path}: damaged and left out: line {', '.join(damaged)}")
        return sum(len(line) + 1 for line in lines)

    def _check(self, entry: Mapping[str, Any], expected: Mapping[str, Any] | None) -> None:
        was, measures = entry["conditions"], entry["measures"]
        if expected is None:
            self.measures, self.conditions, self.about = measures, was, entry["about"]
            return
        differing = [name for name in {**expected, **was} if expected.get(name) != was.get(name)]
        if measures != self.measures or differing:
            what = f"of {measures}" if measures != self.measures else "of other conditions"
            how = "; ".join(f"{name} was {was.get(name)!r}, is {expected.get(name)!r}" for name in differing)
            raise QCFuseError(f"{self.path} holds records {what} ({how}); give another --json or remove it")

    def _write(self, line: Mapping[str, Any]) -> None:
        if self.path is not None:
            with open(self.path, "ab") as file:
                file.write(json.dumps(line, ensure_ascii=False, default=str).encode() + b"\n")


@contextmanager
def terminable() -> Iterator[None]:
    """Have SIGTERM unwind the program as Ctrl-C does."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def execute(run: Run, measure: Callable[[Run], None], report: Callable[[Run], Report], json_file: str | None) -> None:
    """Measure, and publish what has been measured, also if an error, Ctrl-C or SIGTERM ends the measurement.

    The result goes to `json_file` as JSON, with Markdown and the records beside it; `-` prints JSON, None tables alone.
    """
    out = None if json_file in (None, PRINT_JSON) else Path(str(json_file))
    if out is not None:
        if out.suffix != ".json":
            raise QCFuseError(f"the result is JSON, its table goes beside it: call it something.json, not {out}")
        run.path = out.with_suffix(".partial.jsonl")
    try:
        with terminable(), progress_bar(run.measures, "steps") as run.progress:
            measure(run)
    except BaseException:
        publish(run, report, out, as_json=False)
        if run.records and run.path is not None:
            print_line(f"interrupted; the same command goes on from {run.path}", ERR)
        raise
    publish(run, report, out, as_json=json_file == PRINT_JSON)


def publish(run: Run, report: Callable[[Run], Report], out: Path | None, *, as_json: bool) -> None:
    """Write and show the figures of a run's records, if there are any."""
    if not run.records:
        return
    found = report(run)
    notes = [*run.notes, *found.notes]
    records = [{"key": list(key), **record} for key, record in run.records.items()]
    result = {"about": run.about, "conditions": run.conditions, "notes": notes, **found.summary, "records": records}
    if out is not None:
        about = ", ".join(f"{name} {value}" for name, value in run.about.items() if name != "command")
        parts = [f"`{run.about.get('command')}`", about, *(table.markdown() for table in found.tables), *notes]
        write_atomically(out, json.dumps(result, ensure_ascii=False, indent=1, default=str))
        write_atomically(out.with_suffix(".md"), "\n\n".join(parts) + "\n")
    if as_json:
        print_json(json.loads(json.dumps(result, default=str)))
        return
    for table in found.tables:
        OUT.print(table.for_terminal(OUT.width))
    for note in notes:
        print_line(note)
    if out is not None:
        print_line(f"written: {out}, {out.with_suffix('.md')}")


def about_process() -> dict[str, Any]:
    """Describe this process as plain data."""
    return {
        "command": " ".join(["python -m benchmarks", *map(shlex.quote, sys.argv[1:])]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def about_model(lm: LanguageModel) -> dict[str, Any]:
    """Describe this process and its model as plain data."""
    gpu = lm.device.type == "cuda"
    device = torch.cuda.get_device_name(lm.device) if gpu else platform.processor() or platform.machine()
    name = Path(lm.name).name if Path(lm.name).exists() else lm.name
    dtype = lm.number_formats
    return {**about_process(), "model": name, "device": f"{lm.device} ({device})", "dtype": dtype}


def machine_conditions(lm: LanguageModel) -> dict[str, Any]:
    """Return what records of any measurement of a model depend on."""
    about = about_model(lm)
    return {"model": lm.fingerprint.digest, "device": about["device"], "threads": about["threads"]}


def digest_of_texts(texts: Sequence[str]) -> str:
    """Return a digest of texts in their order; repetitions count once."""
    return digest(json.dumps(list(dict.fromkeys(texts))).encode())
