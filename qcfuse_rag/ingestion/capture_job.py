"""Capture groups of passages and keep what was born: whole, or as what their context adds to the framed caches."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from qcfuse_rag.errors import CorruptEntry, PromptTooLong
from qcfuse_rag.ingestion.capture import capture_chunks
from qcfuse_rag.ingestion.chunk_attention import expected_overhead, worth_by_mending
from qcfuse_rag.ingestion.provenance_ledger import ProvenanceLedger
from qcfuse_rag.ingestion.warm_job import WarmJob
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore, Miss
from qcfuse_rag.store.chunk import ChunkKV, compress
from qcfuse_rag.store.key import ChunkKey, hash_ids
from qcfuse_rag.store.prefill_base import FRAMED
from qcfuse_rag.store.provenance import Context
from qcfuse_rag.store.quantization import check_rank
from qcfuse_rag.store.variant_slots import TURN, Kind, Slot, filled_slots, slot_key, slot_to_write, worth_by_use


@dataclass(frozen=True, slots=True)
class CaptureSummary:
    """What capturing did.

    Attributes:
        groups: groups asked for.
        captured: entries written.
        present: entries that were there already, born in the same context and of the same kind.
        tokens: tokens computed.
        size_bytes: bytes written.
        elapsed_s: seconds.
        failed: `(index, reason)` of groups from which something could not be kept.
    """

    groups: int
    captured: int
    present: int
    tokens: int
    size_bytes: int
    elapsed_s: float
    failed: tuple[tuple[int, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


class CaptureJob:
    """Computes groups of passages exactly and keeps every passage but each group's first in its slots.

    Only what was born in one exact pass is kept, never what was fused. A group whose passages are all kept already is
    not computed again.

    Args:
        lm: the model.
        store: where to.
        prefix_ids: token ids of the prompt's fixed head.
        keep: `variant` for whole caches; `difference` for what they have over the framed ones, which are warmed if
            they are absent; `patch` for that in low rank.
        slots: of each passage and kind.
        rank: of patches.
        ledger: what entries are made of.

    Raises:
        ValueError: if nothing or something else is to be kept, or there is no such rank.
    """

    def __init__(
        self,
        lm: LanguageModel,
        store: KVStore,
        prefix_ids: tuple[int, ...],
        *,
        keep: Collection[str] = ("variant",),
        slots: int = 5,
        rank: int = 32,
        ledger: ProvenanceLedger | None = None,
    ) -> None:
        if not keep or not set(keep) <= set(get_args(Kind)):
            raise ValueError(f"cannot keep {', '.join(keep) or 'nothing'}; there are {', '.join(get_args(Kind))}")
        if slots < 1:
            raise ValueError(f"a passage needs a slot, got {slots}")
        self._lm, self._store, self._frame, self._slots = lm, store, prefix_ids, slots
        self._kinds: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind in keep)
        self._rank = check_rank(rank)
        self._ledger = ledger
        self._uses: dict[str, float] | None = None

    def run(self, groups: Iterable[Sequence[tuple[int, ...]]]) -> CaptureSummary:
        """Capture groups of passages, each as token ids in the order of one retrieval.

        Raises:
            StoreError: if the store cannot be written.
        """
        started = time.perf_counter()
        count = captured = present = tokens = size = 0
        failed = []
        for index, group in enumerate(groups):
            count += 1
            chunks = [ids for ids in group if ids]
            wanted = self._wanted(chunks)
            present += max(0, len(chunks) - 1) * len(self._kinds) - len(wanted)
            if not wanted:
                continue
            try:
                begun = time.perf_counter()
                born = capture_chunks(self._lm, self._frame, chunks)
                taken = len(self._frame) + sum(map(len, chunks))
                ms_per_token = 1000 * (time.perf_counter() - begun) / taken
                tokens += taken
                for place, kind in wanted:
                    ids, chunk = chunks[place], born[place - 1]
                    kept = chunk if kind == "variant" else self._difference(kind, ids, chunk)
                    self._put(kind, chunks[: place + 1], kept, ms_per_token * len(ids))
                    captured, size = captured + 1, size + kept.nbytes
            except (PromptTooLong, LookupError) as error:
                failed.append((index, str(error)))
        self._store.flush()
        return CaptureSummary(count, captured, present, tokens, size, time.perf_counter() - started, tuple(failed))

    def _wanted(self, chunks: Sequence[tuple[int, ...]]) -> list[tuple[int, Kind]]:
        """Return which chunks are not kept yet as born here, and as what."""
        hashes = tuple(hash_ids(ids) for ids in chunks)
        return [
            (place, kind)
            for place in range(1, len(chunks))
            for kind in self._kinds
            if not any(self._is(slot, kind, hashes[:place]) for slot in self._filled(kind, chunks[place]))
        ]

    def _is(self, slot: Slot, kind: Kind, context: Context) -> bool:
        """Return whether a slot holds what would be written into it."""
        return slot.context == context and (kind != "patch" or slot.chunk.numbers == self._rank)

    def _filled(self, kind: Kind, ids: tuple[int, ...]) -> list[Slot]:
        return filled_slots(self._store, kind, self._slots, self._lm.fingerprint, self._frame, ids)

    def _put(self, kind: Kind, made_of: Sequence[tuple[int, ...]], chunk: ChunkKV, saved_ms: float) -> None:
        ids = made_of[-1]
        found = self._filled(kind, ids)
        turn = 1.0 + max((slot.turn for slot in found), default=-1.0)
        assert chunk.context is not None
        worth = worth_by_use(found, self._used)
        if kind == "variant":  # a use saves what need not be mended
            worth = worth_by_mending(found, self._used, chunk.context)
            saved_ms *= 1 - expected_overhead(chunk, [slot.context for slot in found])
        number = slot_to_write(found, chunk.context, self._slots, worth)
        key = slot_key(kind, number, self._lm.fingerprint, self._frame, ids)
        self._store.discard(key)  # what it is made of is forgotten now
        with self._noted(key, made_of):
            self._store.put(key, replace(chunk, facts={**chunk.facts, TURN: (turn,)}), saved_ms=saved_ms)

    @contextmanager
    def _noted(self, key: ChunkKey, made_of: Sequence[tuple[int, ...]]) -> Iterator[None]:
        """Write an entry that goes with the passages it is made of.

        Raises:
            LookupError: if one of them went meanwhile, and the entry with it.
        """
        if self._ledger is not None:
            self._ledger.made_of(key, made_of)
        yield
        if self._ledger is not None and not self._ledger.written(key):
            raise LookupError("a passage was forgotten meanwhile")

    def _used(self, slot: Slot) -> float:
        """Return how often a slot was used, as far as the store knows."""
        if self._uses is None:
            self._uses = {entry.address: entry.uses or 0.0 for entry in self._store.entries()}
        return self._uses.get(self._store.address(slot.key), 0.0)

    def _difference(self, kind: Kind, ids: tuple[int, ...], born: ChunkKV) -> ChunkKV:
        key = FRAMED.key(self._lm.fingerprint, self._frame, ids)
        difference = difference_of(born, self._framed(key, ids))
        return compress(difference, self._rank) if kind == "patch" else difference

    def _framed(self, key: ChunkKey, ids: tuple[int, ...]) -> ChunkKV:
        """Return a passage's framed cache as the store has it, warmed if need be."""
        reason = ""
        for _ in range(2):
            if key not in self._store:
                with self._noted(key, [ids]):
                    WarmJob(self._lm, self._store, self._frame, [ids], bases=[FRAMED]).run()
            found = self._store.get(key)
            if isinstance(found, Miss):
                reason = found.reason
                continue
            try:
                found.read()
            except CorruptEntry as error:
                reason = str(error)
                self._store.discard(key, reason)
            else:
                return found
        raise LookupError(f"the framed cache of a passage cannot be kept ({reason}), so no difference to it can")


@torch.inference_mode()
def difference_of(born: ChunkKV, canonical: ChunkKV) -> ChunkKV:
    """Return what a cache has over another of the same tokens, with the birth and the ranking of the first.

    Args:
        born: in a context.
        canonical: without one.
    """
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for layer in range(born.n_layers):
        for kept, one, other in zip((keys, values), born.layer(layer), canonical.layer(layer), strict=True):
            kept.append(_minus(one, other))
    return ChunkKV.of(
        keys,
        values,
        born.blocks["ranking"],
        probe_layers=born.probe_layers,
        context=born.context,
        facts=born.facts,
        extras={name: born.blocks[name] for name in born.extras},
    )


def _minus(one: Tensor, other: Tensor) -> Tensor:
    return (one.float() - other.to(one.device).float()).to(one.dtype)
