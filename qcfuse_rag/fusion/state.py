"""A prompt with the chunks the store had, placed: the state that probes, selection and recomputation share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.fusion.adapters import AdaptedChunk, Adapter, PlacementContext
from qcfuse_rag.fusion.report import Lookup
from qcfuse_rag.prompts.segments import Prompt, Role, Span
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.buffer_pool import BufferPool
from qcfuse_rag.runtime.graphs.prefill_graphs import PrefillRunner
from qcfuse_rag.runtime.kernels.support import kernels_run_on, supports_placement
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.loading.layer_loader import LayerLoader, PendingChunk, Wait
from qcfuse_rag.runtime.loading.loading import Loading
from qcfuse_rag.runtime.loading.wait_budget import WaitBudget
from qcfuse_rag.runtime.placement import copy_chunk, stage_chunk
from qcfuse_rag.store.backends.base import KVStore, Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.prefill_base import BASES, BLIND, Base
from qcfuse_rag.store.slice import cut

if TYPE_CHECKING:
    from qcfuse_rag.runtime.kernels.placement import Block

STAGED_BYTES = 256 << 20
"""What may be on a device beside the buffer before it is placed."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacedChunk:
    """A stored chunk at its place.

    Attributes:
        span: the place.
        chunk: what was placed.
        exact: whether full prefill would give the same.
        demand: the share of its tokens that ought to be recomputed, where an adapter knows; else None.
    """

    span: Span
    chunk: ChunkKV
    exact: bool
    demand: float | None = None


@dataclass(slots=True, eq=False)
class FusedPrompt:
    """Keys and values of a prompt as far as the store had them.

    Attributes:
        lm: the model.
        prompt: the prompt.
        ids: `[T]` int64 token ids on the model's device.
        arriving: rotated keys and values, meaningful where `known`; a pass over it waits at each layer for what is
            still on its way there. See `buffer`.
        passes: compute rows over it.
        known: `[T]` bool on the CPU, positions that hold stored keys and values.
        placed: what was placed, the head included.
        lookups: what became of every segment that could have been stored.
        copied_bytes: bytes copied from the store before any pass.
        row_layers: rows computed so far, summed over the layers each was computed in.
        staged: while loading, what is on the device and not at its place yet; None where chunks are copied there.
        keys: by position, the entry each placed segment came from.
        arrival: what is on its way; None if everything is there.
    """

    lm: LanguageModel
    prompt: Prompt
    ids: Tensor
    arriving: KVBuffer
    passes: PrefillRunner
    known: Tensor
    placed: list[PlacedChunk] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    copied_bytes: int = 0
    row_layers: int = 0
    staged: list[Block] | None = None
    keys: dict[int, ChunkKey] = field(default_factory=dict)
    arrival: LayerLoader | None = None

    @classmethod
    def empty(
        cls,
        lm: LanguageModel,
        prompt: Prompt,
        capacity: int,
        pool: BufferPool | None = None,
        passes: PrefillRunner | None = None,
    ) -> FusedPrompt:
        """Start with nothing known and room for `capacity` tokens.

        Args:
            lm: the model.
            prompt: the prompt.
            capacity: tokens there will be.
            pool: whose memory to use, if there is one.
            passes: of the model, recorded ones perhaps.
        """
        ids = torch.tensor(prompt.ids, dtype=torch.int64).to(lm.device, non_blocking=True)
        buffer = KVBuffer.allocate(lm.shapes, capacity, dtype=lm.dtype, device=lm.device, pool=pool)
        known = torch.zeros(len(prompt), dtype=torch.bool)
        return cls(lm, prompt, ids, buffer, passes or PrefillRunner(lm), known)

    def load(
        self,
        store: KVStore,
        base: Base,
        adapter: Adapter | None = None,
        *,
        start: int = 0,
        loading: Loading | None = None,
        patience: WaitBudget | None = None,
        refused: Mapping[int, Miss] | None = None,
    ) -> None:
        """Place every segment the store has under a base. What it does not have, or has damaged, stays unknown.

        Args:
            store: where chunks may be found.
            base: which stored caches chunks start from.
            adapter: alters or replaces chunks before they are placed.
            start: where to begin; the segments in front have been placed.
            loading: how to go on loading while passes run, over `arriving`; None is done when this returns.
            patience: how long to wait for the store; None as long as it takes.
            refused: chunks not to look for, by their positions, and why.
        """
        refused = refused or {}
        # At position 0 with nothing before it, blind is exact.
        sought = [
            (span, self._key(span, BLIND), BLIND, None)
            if span.segment.role is Role.HEAD
            else (span, self._key(span, base), base, adapter)
            for span in self.prompt.spans
            if span.start >= start and span.segment.role in (Role.HEAD, Role.CHUNK)
        ]

        def look() -> list[AdaptedChunk | Miss]:
            return [refused.get(span.start) or self._look(store, span, key, base, by) for span, key, base, by in sought]

        patience = patience or WaitBudget(None)
        try:
            found = patience.call(look)
        except TimeoutError:
            found = [refused.get(span.start) or Miss(patience.exhausted) for span, _, _, _ in sought]
        kernels = kernels_run_on(self.lm.device, self.lm.dtype, self.lm.widest_head)
        self.staged = [] if kernels else None
        coming = []
        for (span, key, _, _), one in zip(sought, found, strict=True):
            placed = self._load(store, span, key, one, at_once=loading is None)
            coming += [] if placed is None else [PendingChunk(span.start, placed.chunk)]
        self._place()
        self.staged = None
        if loading is not None and coming:
            self.arrival = LayerLoader(
                self.arriving, self.lm.ropes, coming, transfer=loading.transfer(), patience=patience
            )
            self.arriving = replace(self.arriving, arrive=self.arrival.wait)

    @property
    def buffer(self) -> KVBuffer:
        """Rotated keys and values, all there.

        Raises:
            LateMiss: if something that was on its way does not come.
        """
        if self.arrival is not None:
            self.arrival.wait()
        return replace(self.arriving, arrive=None)

    def stop(self) -> None:
        """Load no more."""
        if self.arrival is not None:
            self.arrival.stop()

    @property
    def bytes_loaded(self) -> int:
        """Bytes that came from the store so far."""
        return self.copied_bytes + (0 if self.arrival is None else self.arrival.nbytes)

    @property
    def waits(self) -> Sequence[Wait]:
        """Passes' waits for the store so far."""
        return () if self.arrival is None else self.arrival.waits

    @property
    def placed_chunks(self) -> list[PlacedChunk]:
        """The placed passages, without the head."""
        return [placed for placed in self.placed if placed.span.segment.role is Role.CHUNK]

    def probe_rows(self, *, suffix: bool = False) -> Tensor:
        """Return the rows that ask: all text that is not stored, up to the end of the question.

        Where the question comes before the passages, up to the end of the prompt instead: only what stands behind the
        passages can look at them.

        Args:
            suffix: up to the end of the prompt in any case, what opens the answer included.

        Returns:
            `[R]` int64 ascending positions on the CPU, never empty.
        """
        after = max((span.stop for span in self.prompt.chunks), default=0)
        questions = [
            span.stop for span in self.prompt.spans if span.segment.role is Role.QUESTION and span.start >= after
        ]
        asking = ~self.known
        asking[questions[-1] if questions and not suffix else len(self.prompt) :] = False
        for span in self.prompt.chunks:
            asking[span.start : span.stop] = False
        return asking.nonzero()[:, 0]

    def _key(self, span: Span, base: Base) -> ChunkKey:
        return base.key(self.lm.fingerprint, self.prompt.prefix_ids, span.segment.stored_ids)

    def _look(
        self, store: KVStore, span: Span, key: ChunkKey, base: Base, adapter: Adapter | None
    ) -> AdaptedChunk | Miss:
        found = store.get(key)
        if found == Miss("absent"):
            found = self._absence(store, span, base)
        if adapter is not None:
            adapted = adapter.adapt(PlacementContext(self.lm, store, self.prompt, span, base), found)
        elif isinstance(found, ChunkKV):
            adapted = AdaptedChunk(found, base.exact_behind(self.prompt.ids[: span.start], self.prompt.prefix_ids))
        else:
            adapted = found
        if isinstance(adapted, AdaptedChunk):
            try:
                adapted = replace(adapted, chunk=adapted.chunk.ready_to_probe())  # what is read is waited for here
            except CorruptEntry as error:
                store.discard(adapted.key or key, str(error))
                return Miss(str(error))
            except (OSError, RuntimeError, KeyError, ValueError) as error:
                return Miss(f"cannot be read: {error}")
        return adapted

    def _load(
        self, store: KVStore, span: Span, key: ChunkKey, found: AdaptedChunk | Miss, *, at_once: bool
    ) -> PlacedChunk | None:
        """Note what became of a segment, and copy it to its place if that is to be done at once."""
        copied: int | Miss = 0
        if isinstance(found, AdaptedChunk):
            key = found.key or key
            found = _part_of(span, found)
            copied = self._copy(store, key, span, found.chunk, at_once=at_once)
        miss = next((one for one in (found, copied) if isinstance(one, Miss)), None)
        role, reason = str(span.segment.role), miss.reason if miss else None
        note = found.note if isinstance(found, AdaptedChunk) and miss is None else None
        self.lookups.append(Lookup(role, span.start, len(span), miss is None, reason, note))
        if not isinstance(found, AdaptedChunk) or isinstance(copied, Miss):
            return None
        self.placed.append(PlacedChunk(span, found.chunk, found.exact, found.demand))
        self.known[span.start : span.stop] = True
        self.keys[span.start] = key
        self.copied_bytes += copied
        return self.placed[-1]

    def _absence(self, store: KVStore, span: Span, base: Base) -> Miss:
        """Say if a chunk that is not there under one base is there under another."""
        others = [
            other.name
            for other in BASES.values()
            if other is not base and span.segment.role is Role.CHUNK and self._key(span, other) in store
        ]
        return Miss(f"absent: stored {', '.join(others)}, not {base.name}" if others else "absent")

    def _copy(self, store: KVStore, key: ChunkKey, span: Span, chunk: ChunkKV, *, at_once: bool) -> int | Miss:
        """Copy a chunk to its place, if that is to be done at once; return the bytes, or why it cannot be."""
        if chunk.n_tokens != len(span) or chunk.n_layers != self.lm.n_layers:
            reason = f"has {chunk.n_tokens} tokens and {chunk.n_layers} layers"
            store.discard(key, reason)
            return Miss(reason)
        try:
            if not at_once:
                return 0
            if self.staged is None or not supports_placement(chunk.numbers, self.lm.device):
                return copy_chunk(self.arriving, span.start, chunk, ropes=self.lm.ropes)
            blocks = stage_chunk(self.arriving, span.start, chunk, self.lm.ropes)
            self.staged += blocks
            if sum(block.nbytes for block in self.staged) > STAGED_BYTES:
                self._place()
            return sum(block.nbytes for block in blocks)
        except CorruptEntry as error:
            store.discard(key, str(error))
            return Miss(str(error))
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            return Miss(f"cannot be read: {error}")

    def _place(self) -> None:
        """Put what is staged at its place."""
        if self.staged:
            from qcfuse_rag.runtime.kernels.placement import place_blocks

            place_blocks(self.staged)
            self.staged = []


def _part_of(span: Span, whole: AdaptedChunk) -> AdaptedChunk:
    """Return the part of a chunk that stands in the prompt; a chunk of another length stays whole, and is refused."""
    part = span.segment.part
    if part is None or whole.chunk.n_tokens != len(part.ids):
        return whole
    chunk = cut(whole.chunk, part.start, part.start + len(span))
    return replace(whole, chunk=chunk, exact=whole.exact and part.start == 0)
