"""Time a store on disk beside plain writing and reading of the same bytes.

All sides run in one process and take turns; figures are medians. The bare side writes the same bytes with one `write`
a file and forces each file to disk. It reads each file with one `readinto` into memory that is new to the process,
which is the least that any loader must do. The store's side is `put`, and `get` with every block read and checked.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
from typer import Option

from benchmarks.options import Repeats, counts
from benchmarks.runner import Key, Record, Report, Run, Table, about_process
from qcfuse_rag.cli.console import size
from qcfuse_rag.errors import StoreError
from qcfuse_rag.models.fingerprint import Fingerprint
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.backends.disk import DiskStore
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.entry.codec import encode
from qcfuse_rag.store.key import ChunkKey, hash_ids

WRITE, WRITTEN, COLD, CACHED = "write and fsync", "read what was just written", "read from disk", "read again"
Operation = Callable[[ChunkKey], None]


Shape = tuple[int, int, int, int, torch.dtype]  # layers, heads, channels, tokens, dtype
SHAPES: tuple[Shape, ...] = ((30, 3, 64, 384, torch.float32), (32, 8, 128, 512, torch.bfloat16))
"""A passage of SmolLM2-135M on a CPU, and a longer passage of an 8B model."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the measurement."""

    folder: Annotated[
        Path | None, Option(help="Folder on the disk to measure; by default that of temporary files.")
    ] = None
    mb: Annotated[int, Option(min=1, help="Megabytes of entries for each size of entry.")] = 512
    threads: Annotated[str, Option(help="Numbers of threads, with commas.")] = "1,2,4,8"
    repeats: Repeats = 5


def measure(options: Options, run: Run, shapes: Sequence[Shape] = SHAPES) -> None:
    """Time writing and reading of entries beside the same without a store; all files are removed."""
    with tempfile.TemporaryDirectory(prefix="qcfuse-bench-", dir=options.folder) as path:
        folder = str(options.folder or Path(path).parent)
        run.begin(about_process(), {"folder": folder, "mb": options.mb})
        for number, shape in enumerate(shapes):
            with DiskStore(Path(path) / str(number) / "kv", 4_000_000 * options.mb) as store:
                benchmark = _StoreBenchmark(store, Path(path) / str(number) / "bare", shape, options.mb)
                for count in counts(options.threads):
                    benchmark.measure(count, options.repeats, run)


def report(run: Run) -> Report:
    """Return rates in millions of bytes a second; `of_bare` is the median of the pairs."""
    rounds: dict[Key, list[Record]] = {}
    for (*side, _), record in run.records.items():
        rounds.setdefault(tuple(side), []).append(record)
    rates: list[Record] = []
    for (entry_bytes, threads, operation), records in rounds.items():
        total_mb = float(str(entry_bytes)) * records[0]["entries"] / 1e6
        middle = {side: median(record[side] for record in records) for side in ("store", "bare")}
        rate = {
            **{"entry_bytes": entry_bytes, "operation": operation, "threads": threads},
            **{f"{side}_mb_s": total_mb / seconds for side, seconds in middle.items()},
            "of_bare": median(record["bare"] / record["store"] for record in records),
        }
        rates.append(rate)
    columns = ("entry", "operation", "threads", "store MB/s", "bare MB/s", "of bare")
    cells = [
        [
            *(size(rate["entry_bytes"]), rate["operation"], str(rate["threads"])),
            *(f"{rate['store_mb_s']:,.0f}", f"{rate['bare_mb_s']:,.0f}", f"{rate['of_bare']:.2f}"),
        ]
        for rate in rates
    ]
    return Report({"rates": rates}, [Table(f"a store in {run.conditions['folder']}", columns, cells)])


class _StoreBenchmark:
    """The operations to time, all on the same bytes."""

    def __init__(self, store: DiskStore, bare: Path, shape: Shape, megabytes: int) -> None:
        layers, heads, channels, tokens, dtype = shape
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn((2, layers, heads, tokens, channels), generator=generator).to(dtype)
        ranking = torch.stack([torch.randperm(tokens, generator=generator) for _ in range(layers)])
        self._chunk = ChunkKV.of(list(numbers[0]), list(numbers[1]), ranking)
        fingerprint = Fingerprint("benchmark", "", "", "", str(dtype))
        self._data = b"".join(encode(ChunkKey(fingerprint, "blind", "", hash_ids([0])), self._chunk))
        count = max(1, round(1e6 * megabytes / len(self._data)))
        self._keys = [ChunkKey(fingerprint, "blind", "", hash_ids([number])) for number in range(count)]
        self._store, self._bare = store, bare
        bare.mkdir()

    def measure(self, threads: int, repeats: int, run: Run) -> None:
        """Write everything and read it, from the page cache and from disk, all sides in turns; a round is a record."""
        writing: dict[str, Operation] = {"store": self._put, "bare": self._write}
        reading: dict[str, Operation] = {"store": self._get, "bare": self._read}
        entry_bytes = len(self._data)
        with ThreadPoolExecutor(threads) as pool:
            for turn in range(repeats):
                if (entry_bytes, threads, WRITTEN, turn) in run.records:
                    continue
                self._store.clear()
                times = {WRITE: self._time(pool, turn, writing), WRITTEN: self._time(pool, turn, reading)}
                if hasattr(os, "posix_fadvise"):
                    times[COLD] = self._time(pool, turn, reading, cold=True)
                    times[CACHED] = self._time(pool, turn, reading)
                for operation, seconds in times.items():
                    run.add((entry_bytes, threads, operation, turn), {"entries": len(self._keys), **seconds})

    def _time(
        self, pool: ThreadPoolExecutor, turn: int, operations: Mapping[str, Operation], *, cold: bool = False
    ) -> dict[str, float]:
        """Return the seconds that each operation takes for all entries; each turn begins with another operation."""
        seconds, names = {}, list(operations)
        for step in range(len(names)):
            name = names[(turn + step) % len(names)]
            if cold:
                self._drop_pages()
            started = time.perf_counter()
            list(pool.map(operations[name], self._keys))
            seconds[name] = time.perf_counter() - started
        return seconds

    def _put(self, key: ChunkKey) -> None:
        self._store.put(key, self._chunk)

    def _get(self, key: ChunkKey) -> None:
        chunk = self._store.get(key)
        if isinstance(chunk, Miss):
            raise StoreError(f"an entry that was just written cannot be read: {chunk.reason}")
        chunk.read()

    def _write(self, key: ChunkKey) -> None:
        with open(self._bare / key.address, "wb", buffering=0) as file:
            file.write(self._data)
            os.fsync(file.fileno())

    def _read(self, key: ChunkKey) -> None:
        memory = memoryview(mmap.mmap(-1, len(self._data)))  # new to the process
        with open(self._bare / key.address, "rb", buffering=0) as file:
            file.readinto(memory)

    def _drop_pages(self) -> None:
        """Take all files out of the page cache."""
        for path in [*self._bare.iterdir(), *(path for _, path in self._store.files.entries())]:
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
