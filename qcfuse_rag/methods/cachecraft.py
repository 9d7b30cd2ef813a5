"""Cache-Craft (Agarwal et al., arXiv 2502.15734): place the cache of the closest context, recompute part of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qcfuse_rag.fusion.method import Choice, FixedRatio, Method, PassStart
from qcfuse_rag.fusion.state import AdaptedChunk, FusedPrompt, PlacementContext
from qcfuse_rag.methods.captures.attention import NO_IMPACT, captured_overlap, context_impact
from qcfuse_rag.methods.captures.slots import Slot, follows_system_prefix, predecessors, read_checked, slots_at
from qcfuse_rag.methods.common import TopPerChunk, with_demand
from qcfuse_rag.prompts.segments import Span
from qcfuse_rag.runtime.attention.scores import Scores, attention_weights
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.device import to_device
from qcfuse_rag.runtime.layer_hooks import LayerHook
from qcfuse_rag.runtime.rows import AttentionParams
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import FRAMED, Base


@dataclass(frozen=True, slots=True)
class InterProbe:
    """Score tokens by their stored attention to earlier chunks: Cache-Craft's score (arXiv 2502.15734).

    Another context changes these tokens most. The score does not depend on the question. In chunks without captured
    attention the first tokens come first: there a chunk that was prefilled without a context differs most.
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
    """Place the cache with the smallest fix overhead (CFO): the share of its tokens to recompute.

    `CFO = alpha * CCI * (1 - beta')`. The context impact CCI, measured at capture, is how much the chunk attended to
    earlier chunks; `beta'`, see `captured_overlap`, is the share of that attention whose chunks precede it now, reduced
    if their order differs. As published, chunks that precede it now but not at capture do not count.

    A cache prefilled behind the system prefix alone attended to no chunk, so its overhead would be 0 anywhere, although
    it lacks all chunks that precede it now. Here its overlap is 0 and its impact the smallest known of the chunk:
    `alpha * min CCI`, or `alpha / 2` if the chunk was never captured. So it is placed if no captured cache has a
    relevant overlap.

    With `refuse` a chunk is computed in full if even its best cache has an overhead of 1, which needs an alpha above 1.
    """

    alpha: float = 1.0
    slots: int = 5
    refuse: bool = True

    def __post_init__(self) -> None:
        if self.alpha <= 0 or self.slots < 1:
            raise ValueError(f"alpha and slots must be above 0, got {self.alpha} and {self.slots}")

    def adapt(self, context: PlacementContext, stored: ChunkKV | Miss) -> AdaptedChunk | Miss:
        """Return the exact cache if there is one, else the cache with the smallest overhead, or a miss."""
        if isinstance(stored, ChunkKV) and context.exact_under(context.base):
            return AdaptedChunk(stored, exact=True)
        slots = slots_at(context, "variant", self.slots)
        for overhead, exact, slot in self._ranked(context, slots):
            if overhead >= 1 and self.refuse and (slot is not None or isinstance(stored, ChunkKV)):
                return Miss(f"fix overhead {overhead:.2f}: every stored cache would be recomputed whole")
            chunk = stored if slot is None else read_checked(context.store, slot)
            if isinstance(chunk, ChunkKV):
                name, key = (context.base.name, None) if slot is None else (slot.key.base, slot.key)
                note = f"{name}, exact" if exact else f"{name}, fix overhead {overhead:.2f}"
                return AdaptedChunk(with_demand(chunk, overhead), exact, note=note, key=key)
        return stored if isinstance(stored, Miss) else Miss("absent")

    def _ranked(self, context: PlacementContext, slots: Sequence[Slot]) -> Iterator[tuple[float, bool, Slot | None]]:
        """Yield `(overhead, exact, slot)`, the smallest first; slot None is the cache under the method's base."""
        impacts = [context_impact(slot.chunk) for slot in slots]
        rated: list[tuple[float, bool, Slot | None]] = [
            (self._overhead(min(impacts, default=NO_IMPACT), 0.0), False, None)
        ]
        only_chunks_before, now = follows_system_prefix(context), predecessors(context)
        for slot, impact in zip(slots, impacts, strict=True):
            exact = only_chunks_before and slot.context == now
            overlap = captured_overlap(slot.chunk, now)
            rated.append((0.0 if exact else self._overhead(impact, overlap), exact, slot))
        yield from sorted(rated, key=lambda rating: (not rating[1], rating[0]))  # stable: the framed cache wins ties

    def _overhead(self, impact: float, overlap: float) -> float:
        return min(1.0, max(0.0, self.alpha * impact * (1 - overlap)))


@dataclass(frozen=True, slots=True)
class FocusedChunks:
    """After some layers, stop recomputing tokens of chunks that the question hardly attends to.

    The paper finds that the focused chunks stand out after layers 10 to 15 of 32 for most questions. Here they are
    chosen once, by two numbers of ours.

    Attributes:
        depth: share of the layers after which the focused chunks are chosen.
        share: a chunk is focused if its attention so far, summed over its tokens, is at least this share of the
            attention that the most focused chunk got.
    """

    depth: float = 0.4
    share: float = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.depth <= 1 or not 0 <= self.share <= 1:
            raise ValueError(f"depth and share must be fractions, got {self.depth} and {self.share}")

    def make_hook(self, start: PassStart) -> FocusedChunksPass:
        """Return the hook of one pass."""
        last = min(int(self.depth * start.fused.lm.n_layers), start.fused.lm.n_layers - 1)
        question = to_device(start.fused.probe_rows(), start.fused.lm.device)
        return FocusedChunksPass(start.fused.prompt.chunks, question, start.selection.positions, last, self.share)


@dataclass(eq=False)
class FocusedChunksPass(LayerHook):
    """The hook of one pass: `[Q]` positions of the question, `[S]` recomputed ones, and the last layer measured."""

    chunks: tuple[Span, ...]
    question: Tensor
    recomputed: Tensor
    last: int
    share: float
    _attention: dict[int, float] = field(default_factory=dict, repr=False)

    def before_layer(self, layer: int, rows: Tensor, buffer: KVBuffer) -> Tensor:
        """Drop the recomputed tokens of unfocused chunks, once."""
        if layer != self.last + 1 or not self._attention:
            return rows
        threshold = self.share * max(self._attention.values())
        unfocused = torch.zeros_like(rows, dtype=torch.bool)
        for span in self.chunks:
            if self._attention[span.start] < threshold:
                unfocused |= (rows >= span.start) & (rows < span.stop)
        return rows[~(unfocused & torch.isin(rows, self.recomputed))]

    def on_attention(self, layer: int, rows: Tensor, query: Tensor, key: Tensor, params: AttentionParams) -> None:
        """Add the attention of the question's rows to each chunk, mean over rows and heads."""
        if layer > self.last:
            return
        visible = torch.ones(key.shape[2], dtype=torch.bool, device=key.device)
        queries = query[:, :, torch.searchsorted(rows, self.question)]
        weights = attention_weights(queries, key, self.question, visible, params)
        for span in self.chunks:
            self._attention[span.start] = self._attention.get(span.start, 0.0) + float(
                weights[span.start : span.stop].sum()
            )


CHOICE = Choice(
    "they paid much attention to other passages when they were stored, and those are not in this prompt",
    "attention to earlier passages",
)


def cachecraft(
    ratio: float | None = None,
    base: Base = FRAMED,
    alpha: float = 1.0,
    slots: int = 5,
    early_stop: bool | None = None,
) -> Method:
    """Recompute the tokens that attended to other passages at capture, as many as the change of context demands.

    Args:
        ratio: share of all passages' tokens, divided by demand; None recomputes what each passage demands, as
            published, and computes a passage in full from a demand of 1 on.
        base: stored caches besides the captured ones, see `captures.job.capture`.
        alpha: demand per unit of context impact and change; the paper fits it to a quality target.
        slots: captured caches to try for each passage; the paper's example keeps 5.
        early_stop: after 0.4 of the layers recompute only passages that the question attends to; None does so if no
            ratio is given.
    """
    published = ratio is None
    return Method(
        "cachecraft",
        base,
        choice=CHOICE,
        adapter=ClosestVariant(alpha, slots, refuse=published),
        probe=InterProbe(),
        selector=TopPerChunk(by_demand=published),
        budget=None if ratio is None else FixedRatio(ratio),
        layer_hook=FocusedChunks() if (published if early_stop is None else early_stop) else None,
    )
