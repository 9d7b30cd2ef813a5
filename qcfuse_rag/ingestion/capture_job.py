"""Capture groups of passages and store the results: whole caches, or differences from the framed caches."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.ingestion.capture import capture_chunks
from qcfuse_rag.ingestion.chunk_attention import expected_overhead, worth_by_savings
from qcfuse_rag.ingestion.provenance_ledger import ProvenanceLedger
from qcfuse_rag.ingestion.target import Ids, PrefillTarget
from qcfuse_rag.ingestion.warm_job import WarmJob
from qcfuse_rag.store.backends.base import get_checked
from qcfuse_rag.store.chunk import ChunkKV, to_format, to_store_format
from qcfuse_rag.store.key import ChunkKey, hash_ids
from qcfuse_rag.store.prefill_base import FRAMED
from qcfuse_rag.store.provenance import Context
from qcfuse_rag.store.quantization import check_rank
from qcfuse_rag.store.variant_slots import TURN, Slot, SlotKind, filled_slots, slot_key, slot_to_write, worth_by_use


class _NotKept(Exception):
    """An entry that a capture writes or needs cannot be kept."""


@dataclass(frozen=True, slots=True)
class CaptureSummary:
    """The result of a capture job.

    Attributes:
        groups: groups asked for.
        captured: entries written.
        present: entries that were stored already, of the same kind and from the same context.
        tokens: tokens computed.
        size_bytes: bytes written.
        elapsed_s: seconds.
        failed: `(index, reason)` of groups of which some entry could not be stored.
    """

    groups: int
    captured: int
    present: int
    tokens: int
    size_bytes: int
    elapsed_s: float
    failed: tuple[tuple[int, str], ...]


class CaptureJob:
    """Compute groups of passages exactly, and store every passage but the first of each group in its slots.

    Only results of one exact pass are stored, never fused ones. A group whose passages are all stored already is not
    computed again.

    Args:
        target: the model, the store and the system prefix.
        keep: `variant` stores whole caches; `difference` stores what they have over the framed caches, which are
            warmed if they are missing; `patch` stores that difference in low rank.
        slots: slots of each passage and kind.
        rank: rank of patches.
        ledger: records what entries are made from; None records nothing.

    Raises:
        ValueError: if `keep` is empty or has an unknown kind, or a number is out of range.
    """

    def __init__(
        self,
        target: PrefillTarget,
        *,
        keep: Collection[str] = ("variant",),
        slots: int = 5,
        rank: int = 32,
        ledger: ProvenanceLedger | None = None,
    ) -> None:
        if not keep or not set(keep) <= set(get_args(SlotKind)):
            raise ValueError(f"cannot keep {', '.join(keep) or 'nothing'}; there are {', '.join(get_args(SlotKind))}")
        if slots < 1:
            raise ValueError(f"a passage needs a slot, got {slots}")
        self._target, self._slots = target, slots
        self._kinds: tuple[SlotKind, ...] = tuple(kind for kind in get_args(SlotKind) if kind in keep)
        self._rank = check_rank(rank)
        self._ledger = ledger
        self._uses: dict[str, float] | None = None

    def run(self, groups: Iterable[Sequence[Ids]]) -> CaptureSummary:
        """Capture groups of passages, each as token ids in the order of one retrieval.

        Raises:
            StoreError: if the store cannot be written.
        """
        started = time.perf_counter()
        count = captured = present = tokens = size = 0
        failed = []
        for group_index, group in enumerate(groups):
            count += 1
            chunks = [ids for ids in group if ids]
            missing = self._missing(chunks)
            present += max(0, len(chunks) - 1) * len(self._kinds) - len(missing)
            if not missing:
                continue
            try:
                pass_started = time.perf_counter()
                captures = capture_chunks(self._target.lm, self._target.prefix_ids, chunks)
                computed = len(self._target.prefix_ids) + sum(map(len, chunks))
                ms_per_token = 1000 * (time.perf_counter() - pass_started) / computed
                tokens += computed
                for index, kind in missing:
                    ids, capture = chunks[index], captures[index - 1]
                    chunk = capture if kind == "variant" else self._difference(kind, ids, capture)
                    chunk = to_store_format(chunk, self._target.store.numbers)
                    self._put(kind, chunks[: index + 1], chunk, ms_per_token * len(ids))
                    captured, size = captured + 1, size + chunk.nbytes
            except (PromptTooLong, _NotKept) as error:
                failed.append((group_index, str(error)))
        self._target.store.flush()
        return CaptureSummary(count, captured, present, tokens, size, time.perf_counter() - started, tuple(failed))

    def _missing(self, chunks: Sequence[Ids]) -> list[tuple[int, SlotKind]]:
        """Return the index and kind of each entry that is not stored yet for this order of chunks."""
        hashes = tuple(hash_ids(ids) for ids in chunks)
        return [
            (index, kind)
            for index in range(1, len(chunks))
            for kind in self._kinds
            if not any(self._is_same(slot, kind, hashes[:index]) for slot in self._filled(kind, chunks[index]))
        ]

    def _is_same(self, slot: Slot, kind: SlotKind, context: Context) -> bool:
        """Return whether a slot holds what a capture in this context would write."""
        return slot.context == context and (kind != "patch" or slot.chunk.numbers == self._rank)

    def _filled(self, kind: SlotKind, ids: Ids) -> list[Slot]:
        target = self._target
        return filled_slots(target.store, kind, self._slots, target.lm.fingerprint, target.prefix_ids, ids)

    def _put(self, kind: SlotKind, origins: Sequence[Ids], chunk: ChunkKV, saved_ms: float) -> None:
        """Write a capture of the last origin into one of its slots."""
        ids, target = origins[-1], self._target
        filled = self._filled(kind, ids)
        turn = 1.0 + max((slot.turn for slot in filled), default=-1.0)
        assert chunk.context is not None
        worth = worth_by_use(filled, self._use_count)
        if kind == "variant":  # a use saves the tokens that need no repair
            worth = worth_by_savings(filled, self._use_count, chunk.context)
            saved_ms *= 1 - expected_overhead(chunk, [slot.context for slot in filled])
        number = slot_to_write(filled, chunk.context, self._slots, worth)
        key = slot_key(kind, number, target.lm.fingerprint, target.prefix_ids, ids)
        target.store.discard(key)  # its old origins are forgotten here
        with self._recorded(key, origins):
            target.store.put(key, replace(chunk, facts={**chunk.facts, TURN: (turn,)}), saved_ms=saved_ms)

    @contextmanager
    def _recorded(self, key: ChunkKey, origins: Sequence[Ids]) -> Iterator[None]:
        """Record the origins of an entry that the block writes.

        Raises:
            _NotKept: if an origin was deleted meanwhile; the entry is then deleted too.
        """
        if self._ledger is not None:
            self._ledger.record_origins(key, origins)
        yield
        if self._ledger is not None and not self._ledger.confirm(key):
            raise _NotKept("a passage was forgotten meanwhile")

    def _use_count(self, slot: Slot) -> float:
        """Return how often a slot was used, as far as the store knows."""
        if self._uses is None:
            self._uses = {entry.address: entry.uses or 0.0 for entry in self._target.store.entries()}
        return self._uses.get(self._target.store.address(slot.key), 0.0)

    def _difference(self, kind: SlotKind, ids: Ids, capture: ChunkKV) -> ChunkKV:
        difference = difference_of(capture, self._framed(ids))
        return to_format(difference, self._rank) if kind == "patch" else difference

    def _framed(self, ids: Ids) -> ChunkKV:
        """Return a passage's framed cache from the store, warmed if it is missing.

        Raises:
            _NotKept: if the cache cannot be read twice in a row.
        """
        target, reason = self._target, ""
        key = target.key(FRAMED, ids)
        for _ in range(2):
            if key not in target.store:
                with self._recorded(key, [ids]):
                    WarmJob(target, [ids], bases=[FRAMED]).run()
            stored = get_checked(target.store, key)
            if isinstance(stored, ChunkKV):
                return stored
            reason = stored.reason
        raise _NotKept(f"the framed cache of a passage cannot be kept ({reason}), so no difference to it can")


@torch.inference_mode()
def difference_of(captured: ChunkKV, canonical: ChunkKV) -> ChunkKV:
    """Subtract a cache from another of the same tokens; the result has the first one's context and ranking.

    Args:
        captured: the cache computed in a context.
        canonical: the cache computed without one.
    """
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for layer in range(captured.n_layers):
        for differences, minuend, subtrahend in zip(
            (keys, values), captured.layer(layer), canonical.layer(layer), strict=True
        ):
            differences.append(_subtract(minuend, subtrahend))
    return ChunkKV.of(
        keys,
        values,
        captured.blocks["ranking"],
        probe_layers=captured.probe_layers,
        context=captured.context,
        facts=captured.facts,
        extras={name: captured.blocks[name] for name in captured.extras},
    )


def _subtract(minuend: Tensor, subtrahend: Tensor) -> Tensor:
    """Subtract in float32; return the minuend's dtype and device."""
    return (minuend.float() - subtrahend.to(minuend.device).float()).to(minuend.dtype)
