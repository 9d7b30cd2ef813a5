"""Time a store on disk beside plain writing and reading of the same bytes.

All sides run in one process and take turns; figures are medians. The bare side writes the same bytes with one `write`
a file and forces each file to disk. It reads each file with one `readinto` into newly allocated memory, which is the
least that any loader must do: once into memory that is new to the process, once into memory from the allocator, which
may have been used for the previous file. The store's side is `put`, and `get` with every block read and checked.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from qcfuse_rag.errors import StoreError
from qcfuse_rag.models.fingerprint import Fingerprint
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.backends.disk import DiskStore
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.entry.codec import encode
from qcfuse_rag.store.key import ChunkKey, hash_ids

THREADS = (1, 2, 4, 8)
WRITE, WRITTEN, COLD, CACHED = "write and fsync", "read what was just written", "read from disk", "read again"
Operation = Callable[[ChunkKey], None]


@dataclass(frozen=True, slots=True)
class EntryShape:
    """The shape of the entries to measure with."""

    layers: int
    heads: int
    channels: int
    tokens: int
    dtype: torch.dtype

    def chunk(self) -> ChunkKV:
        """Return a chunk of random numbers."""
        generator = torch.Generator().manual_seed(0)
        sizes = (self.heads, self.tokens, self.channels)
        keys, values = (
            [torch.randn(sizes, generator=generator).to(self.dtype) for _ in range(self.layers)] for _ in range(2)
        )
        ranking = torch.stack([torch.randperm(self.tokens, generator=generator) for _ in range(self.layers)])
        return ChunkKV.of(keys, values, ranking, probe_layers=(self.layers // 2,))

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.tokens} tokens, {self.layers} layers of {self.heads} heads of {self.channels} {dtype}"


ENTRY_SHAPES = (EntryShape(30, 3, 64, 384, torch.float32), EntryShape(32, 8, 128, 512, torch.bfloat16))
"""A passage of SmolLM2-135M on a CPU, and a longer passage of an 8B model."""


def measure_store(
    folder: Path | None = None,
    *,
    megabytes: int = 512,
    repeats: int = 5,
    threads: Sequence[int] = THREADS,
    shapes: Sequence[EntryShape] = ENTRY_SHAPES,
) -> dict[str, Any]:
    """Time writing and reading of entries beside the same without a store; all files are removed.

    Each shape has `megabytes` of entries, in millions of bytes; the bare side writes as many again. Rates are millions
    of bytes a second. Bare reading goes into memory that is new to the process. `recycled` reading goes into memory
    from the allocator, and is None for writing. `of_bare` and `of_recycled` are the store's rate over these rates,
    medians of the pairs.
    """
    rates = []
    with tempfile.TemporaryDirectory(prefix="qcfuse-bench-", dir=folder) as path:
        for number, shape in enumerate(shapes):
            with DiskStore(Path(path) / str(number) / "kv", 4_000_000 * megabytes) as store:
                benchmark = _StoreBenchmark(store, Path(path) / str(number) / "bare", shape, megabytes)
                for count in threads:
                    rates += benchmark.measure(count, repeats)
    return {"folder": str(folder or Path(path).parent), "repeats": repeats, "rates": rates}


class _StoreBenchmark:
    """The operations to time, all on the same bytes."""

    def __init__(self, store: DiskStore, bare: Path, shape: EntryShape, megabytes: int) -> None:
        self._store, self._bare, self._shape, self._chunk = store, bare, str(shape), shape.chunk()
        fingerprint = Fingerprint("benchmark", "", "", "", str(shape.dtype))
        self._data = b"".join(encode(ChunkKey(fingerprint, "blind", "", hash_ids([0])), self._chunk))
        self._bytes = len(self._data)
        count = max(1, round(1e6 * megabytes / self._bytes))
        self._keys = [ChunkKey(fingerprint, "blind", "", hash_ids([number])) for number in range(count)]
        bare.mkdir()

    def measure(self, threads: int, repeats: int) -> list[dict[str, Any]]:
        """Write everything and read it, from the page cache and from disk, all sides in turns."""
        reading = (self._get, self._read_new, self._read_recycled)
        times: dict[str, list[list[float]]] = {operation: [] for operation in (WRITE, WRITTEN, COLD, CACHED)}
        with ThreadPoolExecutor(threads) as pool:
            for turn in range(repeats):
                self._remove_all()
                times[WRITE].append(self._time(pool, turn, (self._put, self._write)))
                times[WRITTEN].append(self._time(pool, turn, reading))
                if self._drop_pages():
                    times[COLD].append(self._time(pool, turn, reading, self._drop_pages))
                    self._time(pool, turn, reading)
                    times[CACHED].append(self._time(pool, turn, reading))
        return [self._rate(operation, threads, rounds) for operation, rounds in times.items() if rounds]

    def _time(
        self, pool: ThreadPoolExecutor, turn: int, operations: Sequence[Operation], before: Callable[[], object] = bool
    ) -> list[float]:
        """Return the seconds that each operation takes for all entries; each turn begins with another operation."""
        seconds = [0.0] * len(operations)
        for step in range(len(operations)):
            index = (turn + step) % len(operations)
            before()
            started = time.perf_counter()
            list(pool.map(operations[index], self._keys))
            seconds[index] = time.perf_counter() - started
        return seconds

    def _rate(self, operation: str, threads: int, rounds: list[list[float]]) -> dict[str, Any]:
        total_mb = self._bytes * len(self._keys) / 1e6
        rates = [total_mb / median(seconds) for seconds in zip(*rounds, strict=True)]
        ratios = [median(seconds[side] / seconds[0] for seconds in rounds) for side in range(len(rates))]
        reading = operation != WRITE
        return {
            **{"entry": self._shape, "entry_bytes": self._bytes, "entries": len(self._keys)},
            **{"operation": operation, "threads": threads},
            **{"store_mb_s": rates[0], "bare_mb_s": rates[1], "of_bare": ratios[1]},
            "recycled_mb_s": rates[2] if reading else None,
            "of_recycled": ratios[2] if reading else None,
        }

    def _put(self, key: ChunkKey) -> None:
        self._store.put(key, self._chunk)

    def _get(self, key: ChunkKey) -> None:
        chunk = self._store.get(key)
        if isinstance(chunk, Miss):
            raise StoreError(f"an entry that was just written cannot be read: {chunk.reason}")
        chunk.read()

    def _write(self, key: ChunkKey) -> None:
        with open(self._bare / key.address, "wb", buffering=0) as file:
            written = 0
            while written < self._bytes:
                written += file.write(memoryview(self._data)[written:])
            os.fsync(file.fileno())

    def _read_new(self, key: ChunkKey) -> None:
        self._read(key, memoryview(mmap.mmap(-1, self._bytes)))

    def _read_recycled(self, key: ChunkKey) -> None:
        self._read(key, torch.empty(self._bytes, dtype=torch.uint8).numpy().data)

    def _read(self, key: ChunkKey, memory: memoryview) -> None:
        with open(self._bare / key.address, "rb", buffering=0) as file:
            read = 0
            while read < self._bytes:
                read += file.readinto(memory[read:]) or self._bytes

    def _remove_all(self) -> None:
        self._store.clear()
        for path in self._bare.iterdir():
            path.unlink()

    def _drop_pages(self) -> bool:
        """Take all files out of the page cache; return whether this system can do that."""
        if not hasattr(os, "posix_fadvise"):
            return False
        for path in [*self._bare.iterdir(), *(path for _, path in self._store.files.entries())]:
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        return True
