"""Capture: compute a prompt's passages exactly in one pass, and store each passage's cache, or what differs from it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor
from torch.nn import functional

from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.ingestion.extension import EntryWriter
from qcfuse_rag.ingestion.prefill import Ids, QueryAttention, instruction_ids
from qcfuse_rag.ingestion.warm_job import WarmJob
from qcfuse_rag.methods.captures.attention import ContextAttention, expected_overhead, worth_by_savings
from qcfuse_rag.methods.captures.slots import (
    TURN,
    Slot,
    SlotKind,
    filled_slots,
    slot_key,
    slot_to_write,
    worth_by_use,
)
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_hidden
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.placement import rotate_buffer
from qcfuse_rag.runtime.rows import AttentionParams, RowsPlan
from qcfuse_rag.store.backends.base import Miss, get_checked
from qcfuse_rag.store.chunk import ChunkKV, to_format, to_store_format
from qcfuse_rag.store.key import FRAMED, hash_ids
from qcfuse_rag.store.quantization import check_rank


class _NotStored(Exception):
    """An entry that a capture writes or needs cannot be kept."""


@dataclass(frozen=True, slots=True)
class CaptureSummary:
    """The result of a capture.

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


def capture(
    writer: EntryWriter,
    groups: Iterable[Sequence[str]],
    *,
    keep: Collection[str] = ("variant",),
    variants: int = 5,
    rank: int = 32,
) -> CaptureSummary:
    """Prefill passages exactly behind those they were retrieved with, and store every passage but the first of a group.

    Only results of one exact pass are stored, never fused ones. A group whose passages are all stored already is not
    computed again. An entry is removed when one of the passages it was made of is gone from the store's sources.

    Args:
        writer: `engine.corpus.entry_writer()`.
        groups: passages of one retrieval each, in their order.
        keep: `variant` for whole caches, `difference` for their difference from the framed caches, which are warmed if
            they are missing, `patch` for the difference in low rank.
        variants: most contexts to keep of each passage. A method looks at as many as its own `slots` or `anchors` say:
            give both the same number.
        rank: of patches.

    Raises:
        StoreError: if the store cannot be written.
        ValueError: if `keep` is empty or names something unknown, or a number is out of range.
    """
    if not keep or not set(keep) <= set(get_args(SlotKind)):
        raise ValueError(f"cannot keep {', '.join(keep) or 'nothing'}; there are {', '.join(get_args(SlotKind))}")
    if variants < 1:
        raise ValueError(f"a passage needs a slot, got {variants}")
    kinds: tuple[SlotKind, ...] = tuple(kind for kind in get_args(SlotKind) if kind in keep)
    job = _CaptureJob(writer, kinds, variants, check_rank(rank))
    return job.run(writer.permitted([writer.prompts.chunk_ids(text) for text in group]) for group in groups)


class _CaptureJob:
    def __init__(self, writer: EntryWriter, kinds: tuple[SlotKind, ...], slots: int, rank: str) -> None:
        self._writer, self._target = writer, writer.target
        self._kinds, self._slots, self._rank = kinds, slots, rank
        self._uses: dict[str, float] | None = None

    def run(self, groups: Iterable[Sequence[Ids]]) -> CaptureSummary:
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
                    ids, chunk = chunks[index], captures[index - 1]
                    if kind != "variant":
                        chunk = difference_of(chunk, self._framed(ids))
                        chunk = to_format(chunk, self._rank) if kind == "patch" else chunk
                    chunk = to_store_format(chunk, self._target.store.kv_dtype)
                    self._put(kind, chunks[: index + 1], chunk, ms_per_token * len(ids))
                    captured, size = captured + 1, size + chunk.nbytes
            except (PromptTooLong, _NotStored) as error:
                failed.append((group_index, str(error)))
        self._target.store.flush()
        return CaptureSummary(count, captured, present, tokens, size, time.perf_counter() - started, tuple(failed))

    def _missing(self, chunks: Sequence[Ids]) -> list[tuple[int, SlotKind]]:
        """Return the index and kind of each entry that is not stored yet for this order of chunks."""
        hashes = tuple(hash_ids(ids) for ids in chunks)

        def is_same(slot: Slot, kind: SlotKind, index: int) -> bool:
            return slot.context == hashes[:index] and (kind != "patch" or slot.chunk.kv_dtype == self._rank)

        return [
            (index, kind)
            for index in range(1, len(chunks))
            for kind in self._kinds
            if not any(is_same(slot, kind, index) for slot in self._filled(kind, chunks[index]))
        ]

    def _filled(self, kind: SlotKind, ids: Ids) -> list[Slot]:
        target = self._target
        return filled_slots(
            target.store, kind, self._slots, target.lm.fingerprint, target.prefix_ids, hash_ids(ids), len(ids)
        )

    def _put(self, kind: SlotKind, origins: Sequence[Ids], chunk: ChunkKV, saved_ms: float) -> None:
        """Write a capture of the last origin into one of its slots."""
        ids, target = origins[-1], self._target
        filled, context = self._filled(kind, ids), tuple(chunk.notes["context"])
        turn = 1.0 + max((slot.turn for slot in filled), default=-1.0)
        worth = worth_by_use(filled, self._use_count)
        if kind == "variant":  # a use saves the tokens that need no repair
            worth = worth_by_savings(filled, self._use_count, context)
            saved_ms *= 1 - expected_overhead(chunk, [slot.context for slot in filled])
        number = slot_to_write(filled, context, self._slots, worth)
        key = slot_key(kind, number, target.lm.fingerprint, target.prefix_ids, ids)
        notes = {**chunk.notes, "facts": {**chunk.notes["facts"], TURN: [turn]}}
        if not self._writer.put(key, replace(chunk, notes=notes), origins, saved_ms=saved_ms):
            raise _NotStored("a passage was forgotten meanwhile")

    def _use_count(self, slot: Slot) -> float:
        """Return how often a slot was used, as far as the store knows."""
        if self._uses is None:
            self._uses = {entry.address: entry.uses or 0.0 for entry in self._target.store.entries()}
        return self._uses.get(self._target.store.address(slot.key), 0.0)

    def _framed(self, ids: Ids) -> ChunkKV:
        """Return a passage's framed cache from the store, warmed if it is missing."""
        target = self._target
        key = target.key(FRAMED, ids)
        stored = get_checked(target.store, key)
        if isinstance(stored, Miss):
            self._writer.begin(key, [ids])
            WarmJob(target, [ids], bases=[FRAMED]).run()
            if not self._writer.confirm(key):
                raise _NotStored("a passage was forgotten meanwhile")
            stored = get_checked(target.store, key)
        if isinstance(stored, Miss):
            raise _NotStored(
                f"the framed cache of a passage cannot be kept ({stored.reason}), so no difference to it can"
            )
        return stored


@torch.inference_mode()
def capture_chunks(lm: LanguageModel, prefix_ids: Ids, chunks: Sequence[Ids]) -> list[ChunkKV]:
    """Compute the system prefix and chunks in one exact pass; return the chunks from the second on, keys unrotated.

    The framed base stores the first one. Each result has its `context`, the facts `cci` and `inter` and the block
    `inter`, see `attention`. Tokens are ranked by an instruction behind the chunk in the same context.

    Raises:
        PromptTooLong: if system prefix and chunks exceed the context window.
    """
    ids = [token for part in (prefix_ids, *chunks) for token in part]
    limit = lm.context_window.tokens
    if len(ids) > limit:
        raise PromptTooLong(
            f"{len(ids):,} tokens of system prefix and passages exceed the context window of {limit:,}; "
            "capture fewer passages at once"
        )
    if len(chunks) < 2:
        return []
    spans, start = [], len(prefix_ids)
    for chunk in chunks:
        spans.append((start, start + len(chunk)))
        start += len(chunk)
    instruction = instruction_ids(lm.tokenizer)
    length = min(len(ids) + len(instruction), limit)
    buffer = lm.empty_buffer(length)
    attention = ContextAttention(lm.n_layers, spans, lm.device)
    plan = RowsPlan.between(0, len(ids), lm.device, lm.sliding, attention.observe)
    forward_hidden(lm, torch.tensor(ids, device=lm.device), plan, buffer, depth=lm.n_layers)

    context, captures = [hash_ids(chunk) for chunk in chunks], []
    for index in reversed(range(1, len(chunks))):  # the instruction overwrites what follows a chunk
        start, stop = spans[index]
        order = _ranked(lm, buffer, start, stop, instruction[: length - stop])
        rotate_buffer(buffer, lm.ropes, start, stop, back=True)
        tokens = slice(start - len(prefix_ids), stop - len(prefix_ids))
        captures.append(
            ChunkKV.of(
                [keys[0, :, start:stop].clone() for keys in buffer.keys],
                [values[0, :, start:stop].clone() for values in buffer.values],
                order,
                notes={"context": context[:index], "facts": attention.facts(index)},
                extras={"inter": attention.tokens[tokens].clone()},
            )
        )
    return captures[::-1]


def _ranked(lm: LanguageModel, buffer: KVBuffer, start: int, stop: int, instruction: Ids) -> Tensor:
    """Compute the instruction behind a chunk, overwriting the buffer; return the ranking `[n_layers, n_tokens]`."""
    ranking = QueryAttention(lm.n_layers, start, [stop - start], [len(instruction)], lm.device)

    def observe(layer: int, query: Tensor, key: Tensor, params: AttentionParams) -> None:
        # The ranking expects rows from the chunk's first token on, but does not read the rows of the chunk itself.
        padded = functional.pad(query, (0, 0, stop - start, 0))
        ranking.observe(layer, padded, key, params)

    if instruction:
        plan = RowsPlan.between(stop, stop + len(instruction), lm.device, lm.sliding, observe)
        forward_hidden(lm, torch.tensor(instruction, device=lm.device), plan, buffer, depth=lm.n_layers)
    return ranking.order(0)


@torch.inference_mode()
def difference_of(captured: ChunkKV, canonical: ChunkKV) -> ChunkKV:
    """Subtract a cache computed without a context from one of the same tokens in one, whose notes the result has."""
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for layer in range(captured.n_layers):
        for differences, minuend, subtrahend in zip(
            (keys, values), captured.layer(layer), canonical.layer(layer), strict=True
        ):
            differences.append((minuend.float() - subtrahend.to(minuend.device).float()).to(minuend.dtype))
    extras = {name: captured.blocks[name] for name in captured.extras}
    return ChunkKV.of(keys, values, captured.blocks["ranking"], notes=captured.notes, extras=extras)
