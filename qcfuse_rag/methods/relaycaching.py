"""RelayCaching (Geng et al., arXiv 2603.13289): reuse the keys and values computed while a text was generated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor
from torch.nn import functional

from qcfuse_rag.fusion.method import Choice, FixedRatio, Method, PassStart
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.fusion.state import AdaptedChunk, PlacementContext
from qcfuse_rag.ingestion.extension import EntryWriter
from qcfuse_rag.methods.common import AllTokens, order_by_key_norm, stored_rows
from qcfuse_rag.runtime.attention.scores import attention_weights
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_hidden
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.layer_hooks import LayerHook
from qcfuse_rag.runtime.rows import AttentionParams, RowsPlan
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import FRAMED, Base, ChunkKey, hash_ids

if TYPE_CHECKING:  # answers are made above the methods
    from qcfuse_rag.generation.decoding import TextStream


@dataclass(frozen=True, slots=True)
class RelayLayers:
    """The layers in which a generated text's keys and values are recomputed.

    Attributes:
        start: first layer to recompute; layers below it keep the stored keys and values.
        detect: layer that chooses tokens; from `start` to `detect` all tokens are recomputed.
        end: last layer to recompute the chosen tokens; layers above it keep the stored keys and values.

    Raises:
        ValueError: if the layers are not `0 <= start <= detect <= end`.
    """

    start: int
    detect: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.detect <= self.end:
            raise ValueError(f"layers must be 0 <= start <= detect <= end, got {self.start}, {self.detect}, {self.end}")

    @classmethod
    def by_depth(cls, n_layers: int) -> Self:
        """Return the middle half of the depth, with detection in its second layer; our guess, not the paper's."""
        start = n_layers // 4
        detect = min(start + 1, n_layers - 1)
        return cls(start, detect, max(detect, min(3 * n_layers // 4, n_layers - 1)))


@dataclass(frozen=True, slots=True)
class PreferGenerated:
    """Place the cache stored when a chunk was generated, else the chunk under the method's base.

    A chunk that is exact under the base stays: a cache generated behind another prompt is never exact.
    """

    def adapt(self, context: PlacementContext, stored: ChunkKV | Miss) -> AdaptedChunk | Miss:
        """Return the chunk to place, or a miss."""
        if isinstance(stored, ChunkKV) and context.exact_under(context.base):
            return AdaptedChunk(stored, exact=True)
        key = context.key(GENERATED)
        generated = context.store.get(key)
        if isinstance(generated, ChunkKV):
            return AdaptedChunk(generated, note="as generated", key=key)
        return AdaptedChunk(stored) if isinstance(stored, ChunkKV) else stored


@dataclass(frozen=True, slots=True)
class RelayRecompute:
    """Recompute all tokens for a few layers, then the tokens that deviate or matter to the end of the prompt.

    A token is chosen if its values deviate at least `deviation` times the mean, or if it gets at least `influence`
    times the mean attention from the last tokens of the prompt. Means are over all candidates.

    No hidden states are stored. So tokens also pass through the layers below `start`, where the stored keys and values
    stay. At `detect` the fresh keys and values of all tokens stay, since they are computed anyway.

    With `fixed` it chooses as many tokens as the budget says, by their scores relative to the thresholds. By default
    it then recomputes them in all layers, as a ratio means it in every method.
    """

    layers: RelayLayers | None = None
    deviation: float = 1.5
    influence: float = 1.45
    suffix: int = 10
    fixed: bool = False

    def __post_init__(self) -> None:
        if self.deviation <= 0 or self.influence <= 0 or self.suffix < 1:
            raise ValueError("thresholds must be above 0, and suffix at least 1")

    def layers_of(self, lm: LanguageModel) -> RelayLayers:
        """Return the layers to recompute in a model.

        Raises:
            ValueError: if the model has no such layer.
        """
        layers = self.layers
        if layers is None:
            layers = usual = RelayLayers.by_depth(lm.n_layers)
            detect = min(lm.attention_layers, key=lambda layer: abs(layer - usual.detect))
            layers = RelayLayers(min(usual.start, detect), detect, max(usual.end, detect))
            return RelayLayers(0, layers.detect, lm.n_layers - 1) if self.fixed else layers
        if layers.end >= lm.n_layers:
            raise ValueError(f"the model has {lm.n_layers} layers, the method asks for layer {layers.end}")
        return layers

    def make_hook(self, start: PassStart) -> RelayRecomputePass:
        """Return the hook of one pass."""
        positions = start.positions
        return RelayRecomputePass(positions, self, self.layers_of(start.fused.lm), start.budget if self.fixed else None)


@dataclass(eq=False)
class RelayRecomputePass(LayerHook):
    """The hook of one pass over `candidates`; without a budget it chooses the tokens above the thresholds."""

    candidates: Tensor
    settings: RelayRecompute
    layers: RelayLayers
    budget: int | None
    chosen: Tensor | None = None
    _stored: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    _deviation: Tensor | None = field(default=None, repr=False)

    def before_layer(self, layer: int, rows: Tensor, buffer: KVBuffer) -> Tensor:
        """Keep all rows up to `detect`, chosen candidates up to `end`, and other positions in every layer."""
        if layer < self.layers.start or layer == self.layers.detect:
            self._stored = stored_rows(buffer, layer, self.candidates)
        if layer <= self.layers.detect:
            return rows
        dropped = torch.isin(rows, self.candidates)
        if layer <= self.layers.end and self.chosen is not None:
            dropped &= ~torch.isin(rows, self.chosen)
        return rows[~dropped]

    def after_write(self, layer: int, rows: Tensor, buffer: KVBuffer) -> None:
        """Restore the stored keys and values below `start`; measure the deviation at `detect`."""
        if layer > self.layers.detect or self._stored is None:
            return
        if layer < self.layers.start:
            buffer.keys[layer][:, :, self.candidates], buffer.values[layer][:, :, self.candidates] = self._stored
        elif layer == self.layers.detect:
            values = self._stored[1], buffer.values[layer][:, :, self.candidates]
            stored, fresh = (part[0].transpose(0, 1).flatten(1).float() for part in values)  # `[N, Hkv D]`
            self._deviation = (1 - functional.cosine_similarity(stored, fresh, dim=-1)).clamp_min(0)
            self._stored = None

    def on_attention(self, layer: int, rows: Tensor, query: Tensor, key: Tensor, params: AttentionParams) -> None:
        """At `detect`, measure the attention of the prompt's last tokens, and choose tokens."""
        if layer != self.layers.detect or self._deviation is None:
            return
        last = rows[-self.settings.suffix :]
        visible = torch.ones(key.shape[2], dtype=torch.bool, device=key.device)
        attention = attention_weights(query[:, :, -len(last) :], key, last, visible, params)
        deviation = _relative_to_mean(self._deviation) / self.settings.deviation
        influence = _relative_to_mean(attention[self.candidates]) / self.settings.influence
        score = torch.maximum(deviation, influence)
        count = int((score >= 1).sum()) if self.budget is None else self.budget
        best = score.argsort(descending=True, stable=True)[:count]
        self.chosen = self.candidates[best.sort().values]


def _relative_to_mean(values: Tensor) -> Tensor:
    """Return values as multiples of their mean; zeros if all are zero."""
    return values / values.mean().clamp_min(torch.finfo(values.dtype).tiny)


CHOICE = Choice("they changed most, or were attended to most, in the layers where the method measures that")


def relaycaching(
    ratio: float | None = None,
    base: Base = FRAMED,
    layers: RelayLayers | None = None,
    deviation: float = 1.5,
    influence: float = 1.45,
    suffix: int = 10,
) -> Method:
    """Recompute generated text in the middle layers: the tokens that deviate or that the prompt's end attends to.

    Args:
        ratio: share of the tokens to choose, recomputed in all layers; None for the published thresholds and layers.
        base: the stored caches for chunks that were not stored with `store_answer`.
        layers: the layers at which to begin, choose and end; None derives them from the depth.
        deviation: choose tokens whose values deviate at least this many times the mean.
        influence: choose tokens that get at least this many times the mean attention.
        suffix: number of tokens at the end of the prompt whose attention counts.
    """
    layer_hook = RelayRecompute(layers, deviation, influence, suffix, fixed=ratio is not None)
    budget = None if ratio is None else FixedRatio(ratio)
    return Method(
        "relaycaching",
        base,
        choice=CHOICE,
        adapter=PreferGenerated(),
        selector=AllTokens(),
        budget=budget,
        layer_hook=layer_hook,
    )


GENERATED = Base("generated", after_prefix=True)
"""Base of generated answers, prefilled behind a whole prompt. Never exact in another prompt; cannot be warmed."""

UNSTABLE_TOKENS = 2
"""Tokens at an answer's end that may differ in a passage: `.` and a blank line are one token in many vocabularies."""


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The outcome of storing an answer: its key and tokens, or the reason why it was not stored.

    Of the tokens, decoding had not computed the last, and those the template adds: `computed`.
    """

    key: ChunkKey | None
    tokens: int = 0
    computed: int = 0
    reason: str | None = None


def store_answer(writer: EntryWriter, stream: TextStream, text: str | None = None) -> StoredAnswer:
    """Store the keys and values of an answer that will be a passage of later prompts.

    They must be exact: ask with `method=make_method("full")`. The tokens that the template adds to a passage are
    computed in one short pass behind the same prompt. Nothing of the prompt is stored, but the keys and values depend
    on it: the entry is removed when one of the prompt's passages is gone from the store's sources.

    Args:
        writer: `engine.corpus.entry_writer()`.
        stream: the answer, from `FusionEngine.stream`; it is finished first if it is not.
        text: the passage, which begins as the answer does; the answer itself if None.

    Returns:
        What was stored, or why nothing was.

    Raises:
        StoreError: if the store cannot be written.
    """
    generation, prompt = stream.result(), stream.prefilled.prompt
    passage = generation.text if text is None else text
    if prompt.joined and writer.has_restricted():
        return StoredAnswer(None, reason="the prompt is a joined text; it may contain passages with restricted access")
    prompt_chunks = [span.segment.ids_hash for span in prompt.chunks]
    if len(writer.permitted([*prompt_chunks, hash_ids(writer.prompts.chunk_ids(passage))])) <= len(prompt_chunks):
        return StoredAnswer(None, reason="the prompt has a passage that some readers of the answer must not read")
    return _store(writer, stream.prefilled, generation.ids, passage)


@torch.inference_mode()
def _store(writer: EntryWriter, prefilled: Prefilled, generated: tuple[int, ...], text: str) -> StoredAnswer:
    lm, prompts, prompt, report = writer.target.lm, writer.prompts, prefilled.prompt, prefilled.report
    # Even without reuse a method may limit what recomputed rows see, and an earlier turn's rows may be inexact.
    if report.base is not None or prefilled.exact_tokens < len(prompt):
        reason = f"an answer of method {report.method} may be inexact; generate it with method full"
        return StoredAnswer(None, reason=reason)
    ids, offsets = prompts.tokens.encode(prompts.template.format_chunk(text))
    n_answer = sum(first < len(text) for first, _ in offsets)  # without the template's tokens
    decoded = generated[:-1]  # the last token was never run
    differs = (new != old for new, old in zip(ids, decoded, strict=False))
    matching = next((i for i, differing in enumerate(differs) if differing), min(len(ids), len(decoded)))
    if matching == 0 or matching < n_answer - UNSTABLE_TOKENS:
        return StoredAnswer(None, reason=f"as a passage the answer has other tokens; {matching} of {n_answer} match")
    start, stop = len(prompt), len(prompt) + len(ids)
    if stop > lm.context_window.tokens:
        return StoredAnswer(
            None, reason=f"prompt and passage exceed the context window of {lm.context_window.tokens:,} tokens"
        )
    buffer = prefilled.buffer
    if matching < len(ids):
        buffer = _copy_buffer(lm, buffer, start + matching, stop)
        tail = torch.tensor(ids[matching:], device=lm.device)
        plan = RowsPlan.between(start + matching, stop, lm.device, lm.sliding)
        forward_hidden(lm, tail, plan, buffer, depth=lm.n_layers)
    positions = torch.arange(start, stop, device=lm.device)
    layers = zip(buffer.keys, lm.ropes, strict=True)
    keys = [rope.rotated(part[0, :, start:stop], -positions) for part, rope in layers]
    values = [layer[0, :, start:stop] for layer in buffer.values]
    prompt_chunks = [span.segment.ids_hash for span in prompt.chunks]
    notes = {"context": prompt_chunks, "facts": {"decoded": [float(matching)]}}
    key = GENERATED.key(lm.fingerprint, prompt.prefix_ids, ids)
    if not writer.put(key, ChunkKV.of(keys, values, order_by_key_norm(keys), notes=notes), prompt_chunks):
        return StoredAnswer(None, reason="a passage of its prompt has been forgotten in the meantime")
    return StoredAnswer(key, len(ids), len(ids) - matching)


def _copy_buffer(lm: LanguageModel, buffer: KVBuffer, filled: int, capacity: int) -> KVBuffer:
    """Return a copy with memory for `capacity` tokens and the first `filled` of them; the original keeps the answer."""
    copy = lm.empty_buffer(capacity)
    for target, source in zip((*copy.keys, *copy.values), (*buffer.keys, *buffer.values), strict=True):
        target[:, :, :filled] = source[:, :, :filled]
    return copy
