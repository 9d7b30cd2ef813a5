"""RelayCaching (Geng et al., arXiv 2603.13289): reuse the keys and values computed while a text was generated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from qcfuse_rag.fusion.adapters import AdaptedChunk, PlacementContext
from qcfuse_rag.fusion.budgets import FixedRatio
from qcfuse_rag.fusion.deviation import stored_rows
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.fusion.selectors import AllTokens, Selection, candidate_positions
from qcfuse_rag.fusion.state import FusedPrompt, PlacedChunk
from qcfuse_rag.ingestion.provenance_ledger import ProvenanceLedger
from qcfuse_rag.ingestion.token_ranking import order_by_key_norm
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.runtime.attention.scores import Scores, attention_weights
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_hidden
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.rows import AttentionParams, RowsPlan
from qcfuse_rag.store.backends.base import KVStore, Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import ChunkKey, hash_ids
from qcfuse_rag.store.prefill_base import FRAMED, Base


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

    Attributes:
        layers: the layers to recompute; None derives them from the depth.
        deviation: threshold on one minus the cosine of stored and fresh values, as a multiple of the mean.
        influence: threshold on attention received, as a multiple of the mean.
        suffix: number of tokens at the prompt's end whose attention counts.
        fixed: choose as many tokens as the budget says, by their scores relative to the thresholds; and by default
            recompute them in all layers, as a ratio means it in every method.
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
            layers = RelayLayers.by_depth(lm.n_layers)
            return RelayLayers(0, layers.detect, lm.n_layers - 1) if self.fixed else layers
        if layers.end >= lm.n_layers:
            raise ValueError(f"the model has {lm.n_layers} layers, the method asks for layer {layers.end}")
        return layers

    def make_hook(
        self,
        fused: FusedPrompt,
        candidates: list[PlacedChunk],
        selection: Selection,
        scores: Scores | None,
        budget: int,
    ) -> RelayRecomputePass:
        """Return the hook of one pass."""
        positions = candidate_positions(candidates, fused.lm.device)
        return RelayRecomputePass(positions, self, self.layers_of(fused.lm), budget if self.fixed else None)


@dataclass(slots=True, eq=False)
class RelayRecomputePass:
    """The hook of one pass.

    Attributes:
        candidates: `[N]` positions of all reused tokens that may deviate.
        settings: the thresholds.
        layers: the layers to recompute.
        budget: number of tokens to choose; None chooses the tokens above the thresholds.
        chosen: `[S]` positions; None before detection.
    """

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

    def after_write(self, layer: int, rows: Tensor, buffer: KVBuffer, query: Tensor) -> None:
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

    def on_attention(
        self,
        layer: int,
        rows: Tensor,
        query: Tensor,
        key: Tensor,
        params: AttentionParams,
    ) -> None:
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
        base: the stored caches for chunks that were not stored with `engine.corpus.put_generated`.
        layers: the layers at which to begin, choose and end; None derives them from the depth.
        deviation: choose tokens whose values deviate at least this many times the mean.
        influence: choose tokens that get at least this many times the mean attention.
        suffix: number of tokens at the end of the prompt whose attention counts.
    """
    layer_hook = RelayRecompute(layers, deviation, influence, suffix, fixed=ratio is not None)
    budget = None if ratio is None else FixedRatio(ratio)
    return Method("relaycaching", base, PreferGenerated(), selector=AllTokens(), budget=budget, layer_hook=layer_hook)


GENERATED = Base("generated", after_prefix=True, ranking="knorm")
"""Base of generated answers, prefilled behind a whole prompt. Never exact in another prompt; cannot be warmed."""

UNSTABLE_TOKENS = 2
"""Tokens at an answer's end that may differ in a passage: `.` and a blank line are one token in many vocabularies."""


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The outcome of storing an answer.

    Attributes:
        key: the key of its entry; None if it was not stored.
        tokens: number of stored tokens.
        computed: number of stored tokens that decoding had not computed: the last, and those the template adds.
        reason: why it was not stored; None if it was.
    """

    key: ChunkKey | None
    tokens: int = 0
    computed: int = 0
    reason: str | None = None


@torch.inference_mode()
def store_answer(
    lm: LanguageModel,
    store: KVStore,
    prompts: PromptBuilder,
    prefilled: Prefilled,
    generated: tuple[int, ...],
    text: str,
    ledger: ProvenanceLedger | None = None,
) -> StoredAnswer:
    """Store the keys and values of an answer under the token ids that it has as a passage of a later prompt.

    They must be exact: the prompt prefilled in full, the answer decoded token by token. The tokens that the template
    adds to a passage are computed in one short pass behind the same prompt. Nothing of the prompt is stored, but the
    keys and values depend on it: use a store that may keep the conversation.

    Args:
        lm: the model.
        store: the store.
        prompts: writes and tokenises passages.
        prefilled: the prompt's prefill, on whose buffer the answer was decoded.
        generated: token ids of the generated answer.
        text: the answer as a passage, or the beginning of it.
        ledger: records the passages that the entry was computed from.

    Returns:
        The entry, or why there is none: the method may reuse stored caches, or a passage is tokenised differently.

    Raises:
        StoreError: if the store cannot be written.
    """
    prompt = prefilled.prompt
    report = prefilled.report
    # Even without reuse a method may limit what recomputed rows see, and an earlier turn's rows may be inexact.
    if report.base is not None or prefilled.exact_tokens < len(prompt):
        reason = f"an answer of method {report.method} may be inexact; generate it with method full"
        return StoredAnswer(None, reason=reason)
    ids = prompts.chunk_ids(text)
    n_answer = sum(first < len(text) for first, _ in prompts.chunk_offsets(text))  # without the template's tokens
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
    keys = _unrotated_keys(lm, buffer, start, stop)
    values = [layer[0, :, start:stop] for layer in buffer.values]
    prompt_chunks = [span.segment.stored_ids for span in prompt.chunks]
    context, facts = tuple(map(hash_ids, prompt_chunks)), {"decoded": (float(matching),)}
    ranking = order_by_key_norm(keys)
    chunk = ChunkKV.of(keys, values, ranking, probe_layers=lm.critical_layers, context=context, facts=facts)
    key = GENERATED.key(lm.fingerprint, prompt.prefix_ids, ids)
    if ledger is not None:
        ledger.record_origins(key, prompt_chunks)
    store.put(key, chunk)
    if prompt_chunks and ledger is not None and not ledger.confirm(key):
        return StoredAnswer(None, reason="a passage of its prompt has been forgotten in the meantime")
    return StoredAnswer(key, len(ids), len(ids) - matching)


def _copy_buffer(lm: LanguageModel, buffer: KVBuffer, filled: int, capacity: int) -> KVBuffer:
    """Return a copy with memory for `capacity` tokens and the first `filled` of them.

    The original keeps the answer's tokens, at positions that are about to be computed for the passage.
    """
    copy = lm.empty_buffer(capacity)
    for target, source in zip((*copy.keys, *copy.values), (*buffer.keys, *buffer.values), strict=True):
        target[:, :, :filled] = source[:, :, :filled]
    return copy


def _unrotated_keys(lm: LanguageModel, buffer: KVBuffer, start: int, stop: int) -> list[Tensor]:
    """Return the unrotated keys of each layer, `[Hkv, stop - start, D]`."""
    positions = torch.arange(start, stop, device=lm.device)
    layers = zip(buffer.keys, lm.ropes, strict=True)
    return [rope.rotated(keys[0, :, start:stop], -positions) for keys, rope in layers]
