"""Records as they come, one JSON line each, so that a bench that was killed goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from qcfuse_rag.bench.configurations import Configuration
from qcfuse_rag.bench.datasets import Example
from qcfuse_rag.bench.prepare import OfflineCost
from qcfuse_rag.errors import QCFuseError

Record = dict[str, Any]
RecordKey = tuple[str, str, str, str | None, float | None]
"""`(dataset, id, method, base, ratio)`."""


class RecordLog:
    """An append-only file of records; its first line says what they may be mixed with.

    Args:
        path: of the file; begun if it is not there.
        conditions: model, data and options on which records depend, as plain data.

    Raises:
        QCFuseError: if the file was begun under other conditions, or is no such file.
    """

    def __init__(self, path: Path, conditions: Mapping[str, Any]) -> None:
        self.path = path
        self.records: dict[RecordKey, Record] = {}
        self.offline: list[OfflineCost] = []
        expected = json.loads(json.dumps(conditions))
        sound = self._read(expected) if path.exists() else 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab")  # noqa: SIM115 - closed by `close`
        self._file.truncate(sound)  # what a killed process half wrote
        if not sound:
            self._append({"conditions": expected})
            self.flush()

    def missing(self, example: Example, configurations: list[Configuration]) -> list[Configuration]:
        """Return the configurations of which there is no record of a question."""
        return [one for one in configurations if (example.dataset, example.id, *one.key) not in self.records]

    def add(self, record: Record) -> None:
        """Write a record, unless there is one of the same question and configuration."""
        key = record_key(record)
        if key not in self.records:
            self.records[key] = record
            self._append({"record": record})

    def add_offline(self, cost: OfflineCost) -> None:
        """Write what a preparation cost."""
        self.offline.append(cost)
        self._append({"offline": asdict(cost)})

    def flush(self) -> None:
        """Wait until everything written is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close the file."""
        self.flush()
        self._file.close()

    def _append(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")

    def _read(self, expected: Mapping[str, Any]) -> int:
        """Take in what is there; return how many bytes of it are sound."""
        data = self.path.read_bytes()
        sound = 0
        for number, line in enumerate(data.splitlines(keepends=True)):
            try:
                entry = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                entry = None
            if number == 0:
                self._check(entry, expected, begun=len(data) > len(line) or entry is not None)
            if entry is None:
                break
            sound += len(line)
            if "record" in entry:
                self.records[record_key(entry["record"])] = entry["record"]
            elif "offline" in entry:
                self.offline.append(OfflineCost(**entry["offline"]))
        return sound

    def _check(self, entry: Any, expected: Mapping[str, Any], *, begun: bool) -> None:
        if not begun:
            return
        if not isinstance(entry, dict) or "conditions" not in entry:
            raise QCFuseError(f"{self.path} is not a file of this bench; give another --json")
        found = entry["conditions"]
        # What a file of an earlier version does not mention is not held against it.
        differing = [name for name in found if expected.get(name) != found[name]]
        if differing:
            was = "; ".join(f"{name} was {found.get(name)!r}, is {expected.get(name)!r}" for name in differing)
            raise QCFuseError(
                f"{self.path} holds records of other conditions ({was}); give another --json or remove it"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def record_key(record: Mapping[str, Any]) -> RecordKey:
    """Return what a record is found by."""
    return record["dataset"], record["id"], record["method"], record["base"], record["ratio"]
