"""A prompt with the chunks the store had, placed: the state that probes, selection and recomputation share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.fuse.adapt import Adapted, Adapter, Place
from qcfuse_rag.fuse.buffer import KVBuffer
from qcfuse_rag.fuse.kernels.support import kernels_place, kernels_run_on, widest_head
from qcfuse_rag.fuse.place import copy_chunk, stage_chunk
from qcfuse_rag.ingest.base import BASES, BLIND, Base
from qcfuse_rag.model.language_model import LanguageModel
from qcfuse_rag.prompt.segments import Prompt, Role, Span
from qcfuse_rag.report.fusion import Lookup
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.contract import KVStore, Miss
from qcfuse_rag.store.key import ChunkKey

if TYPE_CHECKING:
    from qcfuse_rag.fuse.kernels.place import Block

STAGED_BYTES = 256 << 20
"""What may be on a device beside the buffer before it is placed."""


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
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
class Assembly:
    """Keys and values of a prompt as far as the store had them.

    Attributes:
        lm: the model.
        prompt: the prompt.
        ids: `[T]` int64 token ids on the model's device.
        buffer: rotated keys and values; meaningful where `known`.
        known: `[T]` bool, positions that hold stored keys and values.
        placed: what was placed, the head included.
        lookups: what became of every segment that could have been stored.
        bytes_loaded: bytes copied from the store.
        row_layers: rows computed so far, summed over the layers each was computed in.
        staged: while loading, what is on the device and not at its place yet; None where chunks are copied there.
    """

    lm: LanguageModel
    prompt: Prompt
    ids: Tensor
    buffer: KVBuffer
    known: Tensor
    placed: list[Placed] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    bytes_loaded: int = 0
    row_layers: int = 0
    staged: list[Block] | None = None

    @classmethod
    def empty(cls, lm: LanguageModel, prompt: Prompt, capacity: int) -> Assembly:
        """Start with nothing known and room for `capacity` tokens."""
        ids = torch.tensor(prompt.ids, dtype=torch.int64, device=lm.device)
        buffer = KVBuffer.allocate(lm.shapes, capacity, dtype=lm.dtype, device=lm.device)
        return cls(lm, prompt, ids, buffer, known=torch.zeros(len(prompt), dtype=torch.bool, device=lm.device))

    def load(self, store: KVStore, base: Base, adapter: Adapter | None = None, *, start: int = 0) -> None:
        """Place every segment the store has under a base. What it does not have, or has damaged, stays unknown.

        Args:
            store: where chunks may be found.
            base: which stored caches chunks start from.
            adapter: alters or replaces chunks before they are placed.
            start: where to begin; the segments in front have been placed.
        """
        kernels = kernels_run_on(self.lm.device, self.lm.dtype, widest_head(self.lm))
        self.staged = [] if kernels else None
        for span in self.prompt.spans:
            if span.start < start:
                continue
            if span.segment.role is Role.HEAD:
                self._load(store, span, BLIND)  # at position 0 with nothing before it, blind is exact
            elif span.segment.role is Role.CHUNK:
                self._load(store, span, base, adapter)
        self._place()
        self.staged = None

    @property
    def placed_chunks(self) -> list[Placed]:
        """The placed passages, without the head."""
        return [placed for placed in self.placed if placed.span.segment.role is Role.CHUNK]

    def probe_rows(self, *, suffix: bool = False) -> Tensor:
        """Return the rows that ask: all text that is not stored, up to the end of the question.

        Where the question comes before the passages, up to the end of the prompt instead: only what stands behind the
        passages can look at them.

        Args:
            suffix: up to the end of the prompt in any case, what opens the answer included.

        Returns:
            `[R]` int64 ascending positions, never empty.
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

    def _load(self, store: KVStore, span: Span, base: Base, adapter: Adapter | None = None) -> None:
        frame = self.prompt.frame
        key = base.key(self.lm.fingerprint, frame, span.segment.ids)
        found = store.get(key)
        if found == Miss("absent"):
            found = self._absence(store, span, base)
        if adapter is not None:
            adapted = adapter.adapt(Place(self.lm, store, self.prompt, span, base), found)
        elif isinstance(found, ChunkKV):
            adapted = Adapted(found, base.exact_behind(self.prompt.ids[: span.start], frame))
        else:
            adapted = found
        copied: int | Miss = 0
        if isinstance(adapted, Adapted):
            copied = self._copy(store, adapted.key or key, span, adapted.chunk)
        miss = next((one for one in (adapted, copied) if isinstance(one, Miss)), None)
        role, reason = str(span.segment.role), miss.reason if miss else None
        note = adapted.note if isinstance(adapted, Adapted) and miss is None else None
        self.lookups.append(Lookup(role, span.start, len(span), miss is None, reason, note))
        if isinstance(adapted, Adapted) and isinstance(copied, int):
            self.placed.append(Placed(span, adapted.chunk, adapted.exact, adapted.demand))
            self.known[span.start : span.stop] = True
            self.bytes_loaded += copied

    def _absence(self, store: KVStore, span: Span, base: Base) -> Miss:
        """Say if a chunk that is not there under one base is there under another."""
        others = [
            other.name
            for other in BASES.values()
            if other is not base
            and span.segment.role is Role.CHUNK
            and other.key(self.lm.fingerprint, self.prompt.frame, span.segment.ids) in store
        ]
        return Miss(f"absent: stored {', '.join(others)}, not {base.name}" if others else "absent")

    def _copy(self, store: KVStore, key: ChunkKey, span: Span, chunk: ChunkKV) -> int | Miss:
        """Copy a chunk to its place; return the bytes, or why it cannot be."""
        if chunk.n_tokens != len(span) or chunk.n_layers != self.lm.n_layers:
            reason = f"has {chunk.n_tokens} tokens and {chunk.n_layers} layers"
            store.discard(key, reason)
            return Miss(reason)
        try:
            if self.staged is None or not kernels_place(chunk.numbers, self.lm.device):
                return copy_chunk(self.buffer, span.start, chunk, ropes=self.lm.ropes)
            blocks = stage_chunk(self.buffer, span.start, chunk, self.lm.ropes)
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
            from qcfuse_rag.fuse.kernels.place import place_blocks

            place_blocks(self.staged)
            self.staged = []
