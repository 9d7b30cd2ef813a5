"""Where passages come from: a store for each tier and each format of numbers, all with the same passages."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.ingestion.primer import PRIMER_TOKENS
from qcfuse_rag.ingestion.warm_job import WarmJob
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore, Miss
from qcfuse_rag.store.backends.disk import DiskStore
from qcfuse_rag.store.backends.memory import MemoryStore
from qcfuse_rag.store.chunk import Blocks, ChunkKV
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.quantization import LOSSLESS, NUMBERS

UNLIMITED = 1 << 50
TIERS = ("memory", "device", "pinned", "disk", "throttled")


@dataclass(frozen=True, slots=True)
class StoreTier:
    """A store to measure.

    Attributes:
        name: one of `TIERS`.
        numbers: format that passages are kept in, see `store.quantization`.
        store: where they are.
    """

    name: str
    numbers: str
    store: KVStore


def check_tiers(lm: LanguageModel, names: Sequence[str], numbers: Sequence[str]) -> None:
    """Check that there are such tiers here, and such formats.

    Raises:
        QCFuseError: naming what there is.
    """
    gpu = lm.device.type == "cuda"
    there = [tier for tier in TIERS if gpu or tier not in ("device", "pinned")]
    for name in names:
        if name not in there:
            raise QCFuseError(f"no tier {name!r} on {lm.device.type}; there are {', '.join(there)}")
    for form in numbers:
        if form not in NUMBERS:
            raise QCFuseError(f"no format of numbers {form!r}; there are {', '.join(NUMBERS)}")


def open_tiers(
    lm: LanguageModel,
    names: Sequence[str],
    numbers: Sequence[str],
    stack: ExitStack,
    *,
    throttle: float,
    folder: Path | None,
) -> list[StoreTier]:
    """Open a store for each tier in each format; `stack` closes them.

    Args:
        lm: whose device tiers are of.
        names: of `TIERS`.
        numbers: of `store.quantization.NUMBERS`.
        stack: to enter what has to be closed.
        throttle: bytes a second of the throttled tier.
        folder: of the disk; that of temporary files if None.
    """

    def opened(name: str, form: str) -> KVStore:
        if name == "disk":
            where = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
            return stack.enter_context(DiskStore(where, UNLIMITED, numbers=form))
        if name == "throttled":
            return ThrottledStore(throttle, numbers=form)
        device = str(lm.device) if name == "device" else "cpu"
        return MemoryStore(UNLIMITED, device=device, pinned=name == "pinned", numbers=form)

    return [StoreTier(name, form, opened(name, form)) for name in names for form in numbers]


def fill(lm: LanguageModel, stores: Sequence[KVStore], prompt: Prompt, methods: Sequence[Method]) -> None:
    """Prefill a prompt's passages once, in the model's own numbers, and put them into every store."""
    first = next((store for store in stores if store.numbers == LOSSLESS), MemoryStore(UNLIMITED))
    bases = dict.fromkeys(base for method in methods for base in method.bases)
    primer = tuple(range(1, PRIMER_TOKENS + 1))
    WarmJob(lm, first, prompt.prefix_ids, (s.segment.ids for s in prompt.chunks), bases=bases, primer=primer).run()
    for store in stores:
        for entry in first.entries() if store is not first else ():
            found = first.open(entry.address)
            if not isinstance(found, Miss) and found[0] not in store:
                store.put(*found)


class ThrottledBlocks(Blocks):
    """Blocks that take as long to read as they would at some bytes a second."""

    def __init__(self, inner: Blocks, bytes_per_s: float) -> None:
        self._inner, self._bytes_per_s = inner, bytes_per_s

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a block, late."""
        return self._late(self._inner.rows(name, start, stop))

    def __getitem__(self, name: str) -> Tensor:
        return self._late(self._inner[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)

    def _late(self, tensor: Tensor) -> Tensor:
        time.sleep(tensor.nbytes / self._bytes_per_s)
        return tensor


class ThrottledStore(MemoryStore):
    """Keeps chunks in memory and hands them out slowly.

    Args:
        bytes_per_s: how fast at most.
        limit_bytes: most bytes to hold.
        numbers: format to keep, see `store.quantization`.
    """

    def __init__(self, bytes_per_s: float, limit_bytes: int = 1 << 50, *, numbers: str = LOSSLESS) -> None:
        super().__init__(limit_bytes, numbers=numbers)
        self._bytes_per_s = bytes_per_s

    def get(self, key: ChunkKey) -> ChunkKV | Miss:
        """Return a chunk whose blocks come late, or a miss."""
        return self._slow(super().get(key))

    def open(self, address: str) -> tuple[ChunkKey, ChunkKV] | Miss:
        """Return an entry whose blocks come late, or a miss."""
        found = super().open(address)
        if isinstance(found, Miss):
            return found
        slow = self._slow(found[1])
        assert isinstance(slow, ChunkKV)
        return found[0], slow

    def _slow(self, found: ChunkKV | Miss) -> ChunkKV | Miss:
        return (
            found
            if isinstance(found, Miss)
            else replace(found, blocks=ThrottledBlocks(found.blocks, self._bytes_per_s))
        )
