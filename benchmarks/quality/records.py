"""A log of records, one JSON line each, with which a stopped benchmark continues."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.quality.configurations import Configuration
from benchmarks.quality.offline import OfflineCost, depends_on_neighbours
from benchmarks.samples import Example
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.models.fingerprint import digest

Record = dict[str, Any]
RecordKey = tuple[str, str, str, str | None, float | None]  # `(dataset, id, method, base, ratio)`
BEGINNING = b'{"conditions": '


class RecordLog:
    """An append-only file of records; its first line states the conditions under which they were made.

    `damaged` are the numbers of unreadable lines, which were left out. `outdated` counts the records left out because
    they were made beside other passages.

    Raises:
        QCFuseError: if the file was made under other conditions, or is not such a file.
    """

    def __init__(self, path: Path, conditions: Mapping[str, Any]) -> None:
        self.path = path
        self.records: dict[RecordKey, Record] = {}
        self.offline: list[OfflineCost] = []
        self.damaged: list[int] = []
        self.outdated = 0
        expected = json.loads(json.dumps(conditions))
        whole_bytes = self._read(expected) if path.exists() else 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab")  # noqa: SIM115 - closed by `close`
        self._file.truncate(whole_bytes)  # cut off a line that a killed process left unfinished
        if not whole_bytes:
            self._append({"conditions": expected})
            self.flush()

    def missing(self, example: Example, configurations: list[Configuration], beside: str) -> list[Configuration]:
        """Return the configurations without a valid record of a question.

        A record of enriched or captured caches that were made beside other passages is left out and counted; `beside`
        is `digest_of_passages` of all passages prepared together.
        """
        missing = []
        for configuration in configurations:
            key = (example.dataset, example.id, *configuration.key)
            record = self.records.get(key)
            if record is not None and depends_on_neighbours(configuration) and record.get("beside") != beside:
                del self.records[key]
                self.outdated += 1
            if key not in self.records:
                missing.append(configuration)
        return missing

    def add(self, record: Record) -> None:
        """Write a record, unless the question and configuration have one."""
        key = record_key(record)
        if key not in self.records:
            self.records[key] = record
            self._append({"record": record})

    def add_offline(self, cost: OfflineCost) -> None:
        """Write the cost of a preparation."""
        self.offline.append(cost)
        self._append({"offline": asdict(cost)})

    def flush(self) -> None:
        """Force everything written to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close the file."""
        self.flush()
        self._file.close()

    def _append(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")

    def _read(self, expected: Mapping[str, Any]) -> int:
        """Read the file; return the number of bytes in whole lines."""
        *lines, unfinished = self.path.read_bytes().split(b"\n")
        if not lines and not unfinished.startswith(BEGINNING[: len(unfinished)]):
            self._check(None, expected)
        for number, line in enumerate(lines, start=1):
            try:
                entry = dict(json.loads(line))
                if "record" in entry:
                    self.records[record_key(entry["record"])] = entry["record"]
                elif "offline" in entry:
                    self.offline.append(OfflineCost(**entry["offline"]))
            except (ValueError, TypeError, KeyError):
                entry = None
                self.damaged.append(number)
            if number == 1:
                self._check(entry, expected)
        return sum(len(line) + 1 for line in lines)

    def _check(self, entry: Any, expected: Mapping[str, Any]) -> None:
        if entry is None or "conditions" not in entry:
            raise QCFuseError(f"{self.path} is not a file of this bench; give another --json")
        conditions = entry["conditions"]
        differing = [name for name in {**expected, **conditions} if expected.get(name) != conditions.get(name)]
        if differing:
            was = "; ".join(f"{name} was {conditions.get(name)!r}, is {expected.get(name)!r}" for name in differing)
            raise QCFuseError(
                f"{self.path} holds records of other conditions ({was}); give another --json or remove it"
            )


def digest_of_passages(passages: Iterable[str]) -> str:
    """Return a digest of the passages prepared together; repetitions count once."""
    return digest(json.dumps(list(dict.fromkeys(passages))).encode())


def record_key(record: Mapping[str, Any]) -> RecordKey:
    """Return the key of a record."""
    return record["dataset"], record["id"], record["method"], record["base"], record["ratio"]
