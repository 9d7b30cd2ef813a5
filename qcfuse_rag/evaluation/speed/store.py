"""`qcfuse bench store`: a store on disk against nothing but writing and reading the same bytes.

All sides run in one process and take turns; figures are medians. The bare side writes the same bytes with one `write` a
file and forces each to disk, and reads each with one `readinto` into memory allocated for it, which is the least that
any loader must do: once into memory new to the process, once into what the allocator gives, which may be memory used
for the file before. The store's side is `put`, and `get` with every block read and checked.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from qcfuse_rag.cli.console import size
from qcfuse_rag.errors import StoreError
from qcfuse_rag.models.fingerprint import Fingerprint
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.backends.disk import DiskStore
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.entry.codec import encode
from qcfuse_rag.store.key import ChunkKey, hash_ids

THREADS = (1, 2, 4, 8)
WRITE, WRITTEN, COLD, CACHED = "write and fsync", "read what was just written", "read from disk", "read again"
Side = Callable[[ChunkKey], None]


@dataclass(frozen=True, slots=True)
class EntryShape:
    """A chunk to measure with."""

    layers: int
    heads: int
    channels: int
    tokens: int
    dtype: torch.dtype

    def chunk(self) -> ChunkKV:
        """Return one with random numbers."""
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
"""A passage of SmolLM2-135M on a CPU, and a longer one of an 8B model."""


@dataclass(frozen=True, slots=True)
class StoreRate:
    """One measurement; rates are millions of bytes a second.

    Attributes:
        entry: what was stored.
        entry_bytes: size of one file.
        entries: how many files.
        what: writing; reading what the page cache holds since it was written; reading what it does not hold; reading
            what it holds since it was read.
        threads: how many worked at the same time.
        store_mb_s: the store.
        bare_mb_s: the same bytes without it; read into memory new to the process.
        ratio: store over bare, median of the pairs.
        recycled_mb_s: read without the store into memory the allocator gives; None for writing.
        recycled_ratio: store over that.
    """

    entry: str
    entry_bytes: int
    entries: int
    what: str
    threads: int
    store_mb_s: float
    bare_mb_s: float
    ratio: float
    recycled_mb_s: float | None
    recycled_ratio: float | None


@dataclass(frozen=True, slots=True)
class StoreRates:
    """What was measured, and where."""

    folder: str
    repeats: int
    rates: list[StoreRate]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    def table(self) -> Table:
        """Return the figures as a table."""
        columns = ("entry", "what", "threads", "store MB/s", "bare MB/s", "ratio", "bare, recycled", "ratio")
        table = Table(*columns, title=f"A store in {escape(str(self.folder))}, medians of {self.repeats}")
        for one in self.rates:
            row = [size(one.entry_bytes), one.what, str(one.threads), f"{one.store_mb_s:,.0f}"]
            row += [f"{one.bare_mb_s:,.0f}", f"{one.ratio:.2f}"]
            if one.recycled_mb_s is not None:
                row += [f"{one.recycled_mb_s:,.0f}", f"{one.recycled_ratio:.2f}"]
            table.add_row(*row)
        return table


def measure_store(
    folder: Path | None = None,
    *,
    megabytes: int = 512,
    repeats: int = 5,
    threads: Sequence[int] = THREADS,
    shapes: Sequence[EntryShape] = ENTRY_SHAPES,
) -> StoreRates:
    """Measure writing and reading of entries beside the same without a store.

    Args:
        folder: measure the disk it is on; that of temporary files if None. All that is made there is removed again.
        megabytes: bytes of entries for each shape, in millions; as much again is written beside them.
        repeats: rounds of each measurement.
        threads: numbers of threads.
        shapes: chunks to measure with.

    Raises:
        StoreError: if the folder cannot be written, or what is read is not what was written.
        OSError: if it cannot be written beside the store.
    """
    rates = []
    with tempfile.TemporaryDirectory(prefix="qcfuse-bench-", dir=folder) as place:
        for number, shape in enumerate(shapes):
            with DiskStore(Path(place) / str(number) / "kv", 4_000_000 * megabytes) as store:
                sides = _Sides(store, Path(place) / str(number), shape, megabytes)
                for count in threads:
                    rates += sides.measure(count, repeats)
    return StoreRates(str(folder or Path(place).parent), repeats, rates)


class _Sides:
    """The things that are measured, on the same bytes."""

    def __init__(self, store: DiskStore, place: Path, shape: EntryShape, megabytes: int) -> None:
        self._store, self._shape, self._chunk = store, str(shape), shape.chunk()
        fingerprint = Fingerprint("benchmark", "", "", "", str(shape.dtype))
        self._data = b"".join(encode(ChunkKey(fingerprint, "blind", "", hash_ids([0])), self._chunk))
        self._bytes = len(self._data)
        count = max(1, round(1e6 * megabytes / self._bytes))
        self._keys = [ChunkKey(fingerprint, "blind", "", hash_ids([number])) for number in range(count)]
        self._bare = place / "bare"
        self._bare.mkdir()

    def measure(self, threads: int, repeats: int) -> list[StoreRate]:
        """Write everything and read it, from the page cache and from disk, on all sides in turn."""
        reading = (self._get, self._read_new, self._read_recycled)
        times: dict[str, list[list[float]]] = {what: [] for what in (WRITE, WRITTEN, COLD, CACHED)}
        with ThreadPoolExecutor(threads) as pool:
            for turn in range(repeats):
                self._remove_all()
                times[WRITE].append(self._turn(pool, turn, (self._put, self._write)))
                times[WRITTEN].append(self._turn(pool, turn, reading))
                if self._drop_pages():
                    times[COLD].append(self._turn(pool, turn, reading, self._drop_pages))
                    self._turn(pool, turn, reading)
                    times[CACHED].append(self._turn(pool, turn, reading))
        return [self._rate(what, threads, rounds) for what, rounds in times.items() if rounds]

    def _turn(
        self, pool: ThreadPoolExecutor, turn: int, sides: Sequence[Side], before: Callable[[], object] = bool
    ) -> list[float]:
        """Return the seconds that each side takes for all entries; another one begins each time."""
        seconds = [0.0] * len(sides)
        for step in range(len(sides)):
            index = (turn + step) % len(sides)
            before()
            begun = time.perf_counter()
            list(pool.map(sides[index], self._keys))
            seconds[index] = time.perf_counter() - begun
        return seconds

    def _rate(self, what: str, threads: int, rounds: list[list[float]]) -> StoreRate:
        total = self._bytes * len(self._keys) / 1e6
        rates = [total / statistics.median(seconds) for seconds in zip(*rounds, strict=True)]
        ratios = [statistics.median(one[side] / one[0] for one in rounds) for side in range(len(rates))]
        reading = what != WRITE
        return StoreRate(
            self._shape,
            self._bytes,
            len(self._keys),
            what,
            threads,
            store_mb_s=rates[0],
            bare_mb_s=rates[1],
            ratio=ratios[1],
            recycled_mb_s=rates[2] if reading else None,
            recycled_ratio=ratios[2] if reading else None,
        )

    def _put(self, key: ChunkKey) -> None:
        self._store.put(key, self._chunk)

    def _get(self, key: ChunkKey) -> None:
        found = self._store.get(key)
        if isinstance(found, Miss):
            raise StoreError(f"what was just written cannot be read: {found.reason}")
        found.read()

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
        """Take all files out of the page cache; return whether that can be done here."""
        if not hasattr(os, "posix_fadvise"):
            return False
        for path in [*self._bare.iterdir(), *(path for _, path in self._store.files.entries())]:
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        return True
