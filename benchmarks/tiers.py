"""Stores for each storage tier and each number format, all with the same passages."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.ingestion.primer import PRIMER_TOKENS
from qcfuse_rag.ingestion.target import PrefillTarget
from qcfuse_rag.ingestion.warm_job import WarmJob
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore, Miss
from qcfuse_rag.store.backends.disk import DiskStore
from qcfuse_rag.store.backends.memory import UNLIMITED, MemoryStore
from qcfuse_rag.store.quantization import LOSSLESS, STORE_FORMATS

TIERS = ("memory", "device", "pinned", "disk")


@dataclass(frozen=True, slots=True)
class StoreTier:
    """A store to measure, the name of its tier, and the format that it keeps passages in."""

    name: str
    numbers: str
    store: KVStore


def open_tiers(
    lm: LanguageModel,
    names: Sequence[str],
    formats: Sequence[str],
    stack: ExitStack,
    *,
    folder: Path | None,
) -> list[StoreTier]:
    """Open a store for each tier in each format; the stack closes them. An error lists what exists here."""
    available = [tier for tier in TIERS if lm.device.type == "cuda" or tier not in ("device", "pinned")]
    for name in names:
        if name not in available:
            raise QCFuseError(f"there is no tier {name!r} on {lm.device.type}; there are {', '.join(available)}")
    for numbers in formats:
        if numbers not in STORE_FORMATS:
            raise QCFuseError(f"there is no format of numbers {numbers!r}; there are {', '.join(STORE_FORMATS)}")

    def open_tier(name: str, numbers: str) -> KVStore:
        if name == "disk":
            path = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
            return stack.enter_context(DiskStore(path, UNLIMITED, numbers=numbers))
        device = str(lm.device) if name == "device" else "cpu"
        return MemoryStore(UNLIMITED, device=device, pinned=name == "pinned", numbers=numbers)

    return [StoreTier(name, numbers, open_tier(name, numbers)) for name in names for numbers in formats]


def fill(lm: LanguageModel, stores: Sequence[KVStore], prompt: Prompt, methods: Sequence[Method]) -> None:
    """Prefill a prompt's passages once, in the model's own dtype, and put them into every store."""
    first = next((store for store in stores if store.numbers == LOSSLESS), MemoryStore(UNLIMITED))
    bases = dict.fromkeys(base for method in methods for base in method.bases)
    passages = [span.segment.ids for span in prompt.chunks]
    primer = passages[0][:PRIMER_TOKENS]
    WarmJob(PrefillTarget(lm, first, prompt.prefix_ids, primer), passages, bases=bases).run()
    for store in stores:
        if store is not first:
            copy_entries(first, store)


def copy_entries(source: KVStore, target: KVStore) -> None:
    """Put every entry of a store that another store lacks into that store."""
    for entry in source.entries():
        opened = source.open(entry.address)
        if not isinstance(opened, Miss) and opened[0] not in target:
            target.put(*opened)
