"""A prompt with the chunks the store had, placed: the state that probes, selection and recomputation share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from qcfuse_rag.fusion.report import Lookup
from qcfuse_rag.prompts.segments import Prompt, Role, Span
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.device import to_device
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.loading.layer_loader import LayerLoader, WaitBudget, WaitInterval
from qcfuse_rag.runtime.loading.sources import LoadingChunk
from qcfuse_rag.runtime.residuals import ResidualSpread
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.backends.base import KVStore, Miss
from qcfuse_rag.store.chunk import ChunkKV, slice_chunk
from qcfuse_rag.store.key import Base, ChunkKey


@dataclass(frozen=True, slots=True)
class PlacementContext:
    """The position of a chunk in a prompt, for adapters; `base` is that under which it was looked up."""

    lm: LanguageModel
    store: KVStore
    prompt: Prompt
    span: Span
    base: Base

    def key(self, base: Base) -> ChunkKey:
        """Return the chunk's address under a base."""
        return base.key(self.lm.fingerprint, self.prompt.prefix_ids, self.span.segment.ids_hash)

    def exact_under(self, base: Base) -> bool:
        """Return whether the chunk under a base equals what full prefill would compute at this position."""
        part = self.span.segment.part
        begins = part is None or part.start == 0
        return begins and base.exact_at(self.span.start, self.prompt.ids, self.prompt.prefix_ids)


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedChunk:
    """A chunk to place.

    Attributes:
        chunk: keys and values.
        exact: whether a full prefill of this prompt would give the same.
        note: how it was adapted, in words, for the report.
        key: the entry it came from, which is discarded if it proves damaged; None for the one looked up.
    """

    chunk: ChunkKV
    exact: bool = False
    note: str | None = None
    key: ChunkKey | None = None


class Adapter(Protocol):
    """Chooses or alters the chunk to place at a position in a prompt."""

    def adapt(self, context: PlacementContext, stored: ChunkKV | Miss) -> AdaptedChunk | Miss:
        """Return the chunk to place instead of the `stored` one, or the reason why its tokens are to be computed."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PlacedChunk:
    """A stored chunk at its positions in a prompt; `exact` if full prefill would give the same keys and values."""

    span: Span
    chunk: ChunkKV
    exact: bool


@dataclass(slots=True, eq=False)
class FusedPrompt:
    """The keys and values of a prompt, as far as the store has them.

    Attributes:
        ids: `[T]` int64 token ids on the model's device.
        buffer: rotated keys and values, meaningful where `known` once they are loaded; see `loading_buffer`.
        known: `[T]` bool on the CPU, positions that hold stored keys and values.
        placed: the placed chunks, the system prefix included.
        lookups: the outcome of every segment that could have been stored, in order.
        row_layers: rows computed so far, summed over the layers each was computed in.
        loader: brings the chunks into the buffer; None if nothing is to be loaded.
        residuals: corrects passage tokens that are not recomputed, in all passes; None for no correction.
        prefix_tokens: leading positions that an earlier request has computed; see `fusion.prefix_cache`.
        prefix_exact: how many of these are full prefill's.
        others_s: seconds that other requests ran between parts of the prefill.
        parts: number of passes that computed the rows; 0 if there was nothing between them.
    """

    runner: ModelRunner
    prompt: Prompt
    ids: Tensor
    buffer: KVBuffer
    known: Tensor
    placed: list[PlacedChunk] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    row_layers: int = 0
    loader: LayerLoader | None = None
    residuals: ResidualSpread | None = None
    prefix_tokens: int = 0
    prefix_exact: int = 0
    others_s: float = 0.0
    parts: int = 0

    @classmethod
    def empty(cls, runner: ModelRunner, prompt: Prompt, capacity: int) -> FusedPrompt:
        """Start with nothing known and memory for `capacity` tokens."""
        ids = to_device(torch.tensor(prompt.ids, dtype=torch.int64), runner.lm.device)
        known = torch.zeros(len(prompt), dtype=torch.bool)
        return cls(runner, prompt, ids, runner.allocate(capacity), known)

    @property
    def lm(self) -> LanguageModel:
        """The model."""
        return self.runner.lm

    def load(self, outcomes: Sequence[tuple[Span, AdaptedChunk | Miss]], wait_budget: WaitBudget) -> None:
        """Begin to place the chunks that were looked up; missing ones stay unknown.

        Raises:
            LateMissError: if the runner does not overlap loading with computing and a chunk cannot be read.
        """
        pending = []
        for span, outcome in outcomes:
            placed = self._note(span, outcome)
            pending += [] if placed is None else [LoadingChunk(span.start, placed.chunk)]
        if not pending:
            return
        self.loader = LayerLoader(
            self.buffer,
            self.lm.ropes,
            pending,
            transfer=self.lm.transfer(),
            wait_budget=wait_budget,
        )
        self.buffer = replace(self.buffer, wait_for_layer=self.loader.wait)
        if not self.runner.overlap:
            self.loader.wait()

    @property
    def loading_buffer(self) -> KVBuffer:
        """The buffer for a pass that waits at each layer for the stored chunks of that layer."""
        return self.buffer if self.residuals is None else replace(self.buffer, residuals=self.residuals)

    def await_all(self) -> KVBuffer:
        """Wait until every stored layer is in its place; return the buffer.

        Raises:
            LateMissError: if a chunk cannot be read, or not in time.
        """
        if self.loader is not None:
            self.loader.wait()
        return replace(self.buffer, wait_for_layer=None, residuals=self.residuals)

    def stop(self) -> None:
        """Stop loading."""
        if self.loader is not None:
            self.loader.stop()

    @property
    def bytes_loaded(self) -> int:
        """Bytes that came from the store so far."""
        return 0 if self.loader is None else self.loader.nbytes

    @property
    def waits(self) -> Sequence[WaitInterval]:
        """The waits of passes for the store so far."""
        return () if self.loader is None else self.loader.waits

    @property
    def placed_chunks(self) -> list[PlacedChunk]:
        """The placed passages, without the system prefix."""
        return [placed for placed in self.placed if placed.span.segment.role is Role.CHUNK]

    def probe_rows(self, *, suffix: bool = False) -> Tensor:
        """Return the rows that ask: all text that is not stored, up to the end of the question.

        As a `suffix`, or where the question comes before the passages, the rows go up to the end of the prompt instead:
        only text behind the passages can attend to them. They are `[R]` int64 ascending on the CPU, never empty.
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

    def _note(self, span: Span, outcome: AdaptedChunk | Miss) -> PlacedChunk | None:
        """Note the outcome of a lookup; return the chunk to load, or None."""
        role, is_passage = str(span.segment.role), span.segment.role is Role.CHUNK
        passage = self.prompt.passages.index(span.segment.ids_hash) if is_passage else None
        if isinstance(outcome, AdaptedChunk):
            outcome = self._part_of(span, outcome)
        if isinstance(outcome, Miss):
            self.lookups.append(Lookup(role, span.start, len(span), False, outcome.reason, passage=passage))
            return None
        self.lookups.append(Lookup(role, span.start, len(span), True, None, outcome.note, outcome.exact, passage))
        self.placed.append(PlacedChunk(span, outcome.chunk, outcome.exact))
        self.known[span.start : span.stop] = True
        return self.placed[-1]

    def _part_of(self, span: Span, whole: AdaptedChunk) -> AdaptedChunk | Miss:
        """Return the part of a chunk that stands in the prompt; a chunk of another length is discarded."""
        part, chunk = span.segment.part, whole.chunk
        expected = len(span) if part is None else part.n_tokens
        if chunk.n_tokens != expected or chunk.n_layers != self.lm.n_layers:
            reason = f"has {chunk.n_tokens} tokens and {chunk.n_layers} layers"
            if whole.key is not None:
                self.runner.store.discard(whole.key, reason)
            return Miss(reason)
        if part is None:
            return whole
        return replace(whole, chunk=slice_chunk(chunk, part.start, part.start + len(span)))
