"""Cache-Craft (Agarwal et al., arXiv 2502.15734): the cache from the closest context, mended where it looked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qcfuse_rag.fusion.adapters import AdaptedChunk, PlacementContext, follows_system_prefix
from qcfuse_rag.fusion.budgets import FixedRatio
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.selectors import Selection, TopPerChunk
from qcfuse_rag.fusion.state import FusedPrompt, PlacedChunk
from qcfuse_rag.ingestion.chunk_attention import NO_IMPACT, captured_overlap, context_impact
from qcfuse_rag.prompts.segments import Span
from qcfuse_rag.runtime.attention.scores import Scores, attention_weights
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.prefill_base import FRAMED, Base
from qcfuse_rag.store.variant_slots import Slot, filled_slots, read_checked


@dataclass(frozen=True, slots=True)
class InterProbe:
    """Cache-Craft's (arXiv 2502.15734) score: tokens that looked at earlier chunks are those another context changes.

    Does not depend on the question. Of chunks that were not captured the first tokens come first: there a chunk read
    without a context differs most.
    """

    def scores(self, fused: FusedPrompt) -> Scores:
        """Score every position; nothing is computed."""
        device = fused.lm.device
        by_layer = torch.zeros(1, len(fused.prompt), dtype=torch.float32, device=device)
        for placed in fused.placed_chunks:
            score = -torch.arange(len(placed.span), dtype=torch.float32, device=device)
            if "inter" in placed.chunk.extras:
                score = placed.chunk.blocks["inter"][:, 0].to(device)
            by_layer[0, placed.span.start : placed.span.stop] = score
        return Scores(by_layer, (0,))


@dataclass(frozen=True, slots=True)
class ClosestVariant:
    """Place the cache with the smallest fix overhead (CFO): the share of its tokens that ought to be recomputed.

    `CFO = alpha * CCI * (1 - beta')`, where CCI, measured at birth, says how much the chunk looked at those before it;
    and `beta'`, see `prefix_overlap`, how much of that is before it again. What is before it now and was not then does
    not count, as published.

    A cache born behind the head alone has looked at nobody. The formula would call it free to reuse anywhere; but it
    misses all that is before it now. Here it counts as one that shares nothing, with the least impact known of the
    chunk: `alpha * min CCI`, or `alpha / 2` if the chunk was never captured. So it is placed if no captured one shares
    anything that matters.

    Attributes:
        alpha: fitted to a quality target in the paper, per model; above 1 it makes overheads of 1 possible.
        slots: variants to try for each chunk.
        refuse: compute a chunk anew if even its best cache has an overhead of 1.
    """

    alpha: float = 1.0
    slots: int = 5
    refuse: bool = True

    def __post_init__(self) -> None:
        if self.alpha <= 0 or self.slots < 1:
            raise ValueError(f"alpha and slots must be above 0, got {self.alpha} and {self.slots}")

    def adapt(self, context: PlacementContext, stored: ChunkKV | Miss) -> AdaptedChunk | Miss:
        """Choose. What a full prefill of this prompt would give comes first and is exact."""
        prompt, ids = context.prompt, context.span.segment.stored_ids
        before = prompt.ids[: context.span.start]
        if isinstance(stored, ChunkKV) and context.base.exact_behind(before, prompt.prefix_ids):
            return AdaptedChunk(stored, exact=True, demand=0.0)
        slots = filled_slots(context.store, "variant", self.slots, context.lm.fingerprint, prompt.prefix_ids, ids)
        for overhead, exact, slot in self._ranked(context, slots):
            if overhead >= 1 and self.refuse and (slot is not None or isinstance(stored, ChunkKV)):
                return Miss(f"fix overhead {overhead:.2f}: no cache of it is worth mending")
            chunk = stored if slot is None else read_checked(context.store, slot)
            if isinstance(chunk, ChunkKV):
                name, key = (context.base.name, None) if slot is None else (slot.key.base, slot.key)
                note = f"{name}, exact" if exact else f"{name}, fix overhead {overhead:.2f}"
                return AdaptedChunk(chunk, exact, overhead, note, key)
        return stored if isinstance(stored, Miss) else Miss("absent")

    def _ranked(self, context: PlacementContext, slots: Sequence[Slot]) -> Iterator[tuple[float, bool, Slot | None]]:
        """Yield `(overhead, exact, slot)`, the easiest first; the cache under the method's base as slot None."""
        known = [context_impact(slot.chunk) for slot in slots]
        rated: list[tuple[float, bool, Slot | None]] = [
            (self._overhead(min(known, default=NO_IMPACT), 0.0), False, None)
        ]
        straight = follows_system_prefix(context)
        for slot, impact in zip(slots, known, strict=True):
            exact = straight and slot.context == context.predecessors
            overlap = captured_overlap(slot.chunk, context.predecessors)
            rated.append((0.0 if exact else self._overhead(impact, overlap), exact, slot))
        yield from sorted(rated, key=lambda one: (not one[1], one[0]))  # stable: of equals the framed cache is first

    def _overhead(self, impact: float, overlap: float) -> float:
        return min(1.0, max(0.0, self.alpha * impact * (1 - overlap)))


@dataclass(frozen=True, slots=True)
class FocusedChunks:
    """While tokens are recomputed, see which chunks the question looks at; after some layers mend only those.

    The paper finds that the focused chunks stand out after layers 10 to 15 of 32 for most questions. Here it is decided
    once, by two numbers of ours.

    Attributes:
        depth: share of the layers after which it is decided.
        share: a chunk is focused if the attention it got so far, summed over its tokens, is at least this share of what
            the most focused chunk got.
    """

    depth: float = 0.4
    share: float = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.depth <= 1 or not 0 <= self.share <= 1:
            raise ValueError(f"depth and share must be fractions, got {self.depth} and {self.share}")

    def make_hook(
        self,
        fused: FusedPrompt,
        candidates: list[PlacedChunk],
        selection: Selection,
        scores: Scores | None,
        budget: int,
    ) -> FocusedChunksPass:
        """Return the watch over one pass."""
        last = min(int(self.depth * fused.lm.n_layers), fused.lm.n_layers - 1)
        asking = fused.probe_rows().to(fused.lm.device, non_blocking=True)
        return FocusedChunksPass(fused.prompt.chunks, asking, selection.positions, last, self.share)


@dataclass(slots=True, eq=False)
class FocusedChunksPass:
    """One pass's watch.

    Attributes:
        chunks: all passages of the prompt.
        asking: `[Q]` positions of the question's rows.
        mending: `[S]` positions of reused tokens that are recomputed.
        last: the last layer that is looked at.
        share: see `FocusedChunks`.
        chosen: None: those that were mended to the end count.
    """

    chunks: tuple[Span, ...]
    asking: Tensor
    mending: Tensor
    last: int
    share: float
    chosen: Tensor | None = None
    _looks: dict[int, float] = field(default_factory=dict, repr=False)

    def before_layer(self, layer: int, rows: Tensor, buffer: KVBuffer) -> Tensor:
        """Let go of the mended tokens of unfocused chunks, once."""
        if layer != self.last + 1 or not self._looks:
            return rows
        enough = self.share * max(self._looks.values())
        unfocused = torch.zeros_like(rows, dtype=torch.bool)
        for span in self.chunks:
            if self._looks[span.start] < enough:
                unfocused |= (rows >= span.start) & (rows < span.stop)
        return rows[~(unfocused & torch.isin(rows, self.mending))]

    def after_write(self, layer: int, rows: Tensor, buffer: KVBuffer, query: Tensor) -> None:
        """Change nothing."""

    def on_attention(
        self,
        layer: int,
        rows: Tensor,
        query: Tensor,
        key: Tensor,
        *,
        scaling: float,
        softcap: float | None,
        window: int | None,
    ) -> None:
        """Add what each chunk gets from the question's rows, mean over rows and heads."""
        if layer > self.last:
            return
        known = torch.ones(key.shape[2], dtype=torch.bool, device=key.device)
        own = query[:, :, torch.searchsorted(rows, self.asking)]
        weights = attention_weights(own, key, self.asking, known, scaling=scaling, softcap=softcap, window=window)
        for span in self.chunks:
            self._looks[span.start] = self._looks.get(span.start, 0.0) + float(weights[span.start : span.stop].sum())


def cachecraft(
    ratio: float | None = None,
    base: Base = FRAMED,
    alpha: float = 1.0,
    slots: int = 5,
    early_stop: bool | None = None,
) -> Method:
    """Recompute the tokens that looked at other passages when captured, as many as the change of context demands.

    Args:
        ratio: share of all passages' tokens, divided by demand; None recomputes what each passage demands, and a whole
            passage from a demand of 1 on, as published.
        base: stored caches beside those captured with `FusionEngine.capture`.
        alpha: demand per unit of context impact and change; the paper fits it to a quality target.
        slots: captured caches to try for each passage; the paper's example keeps 5.
        early_stop: after 0.4 of the layers mend only passages that the question looks at; if None, without a ratio.
    """
    published = ratio is None
    return Method(
        "cachecraft",
        base,
        adapter=ClosestVariant(alpha, slots, refuse=published),
        probe=InterProbe(),
        selector=TopPerChunk(by_demand=published),
        budget=None if ratio is None else FixedRatio(ratio),
        layer_hook=FocusedChunks() if (published if early_stop is None else early_stop) else None,
    )
