"""How much the chunks of a prompt look at each other: Cache-Craft's statistics (arXiv 2502.15734), from one pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qcfuse_rag.runtime.reference_attention import attention_scores
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.context_distance import kendall_distance
from qcfuse_rag.store.variant_slots import Slot

MAX_SCORE_BYTES = 256 << 20


class ContextAttention:
    """Watches a pass over all rows of a prompt, and sums the attention that chunks pay to each other.

    A weight is a row's share of its whole attention, the prompt's head included, mean over heads; what a learned sink
    takes off (gpt-oss) is left in. Scores are made a block of rows at a time.

    Args:
        n_layers: layers of the model.
        spans: `(start, stop)` of each chunk, one right behind the other, in a prompt computed from position 0.
        device: of the pass.

    Attributes:
        mass: `[n_layers, C, C]` float32, from the tokens of a chunk (first C) to those of one not behind it.
        tokens: `[T]` float32 for the positions from the first chunk's start: what each token pays to chunks before
            its own, mean over layers.
    """

    def __init__(self, n_layers: int, spans: Sequence[tuple[int, int]], device: torch.device) -> None:
        self._start, self._stop = spans[0][0], spans[-1][1]
        lengths = torch.tensor([stop - start for start, stop in spans], device=device)
        self._chunk = torch.arange(len(spans), device=device).repeat_interleave(lengths)  # of each position
        self._lengths = lengths
        self._n_layers = n_layers
        self.mass = torch.zeros(n_layers, len(spans), len(spans), device=device)
        self.tokens = torch.zeros(self._stop - self._start, device=device)

    def observe(
        self, layer: int, query: Tensor, key: Tensor, scaling: float, softcap: float | None, window: int | None
    ) -> None:
        """Sum one layer's attention; an `Observer` of `runtime.rows`.

        Args:
            layer: the layer.
            query: `[1, Hq, T, D]` of all rows.
            key: `[1, Hkv, T, D]`.
            scaling: factor on scores.
            softcap: cap on scores, or None.
            window: sliding window in tokens, or None.
        """
        chunks = len(self._lengths)
        member = torch.nn.functional.one_hot(self._chunk, chunks).to(torch.float32)
        step = max(1, MAX_SCORE_BYTES // (4 * query.shape[1] * self._stop))
        for start in range(self._start, self._stop, step):
            stop = min(start + step, self._stop)
            distance = (
                torch.arange(start, stop, device=key.device)[:, None] - torch.arange(stop, device=key.device)[None, :]
            )
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            scores = attention_scores(query[:, :, start:stop], key[:, :, :stop], scaling, softcap)
            weights = scores.masked_fill_(~seen, float("-inf")).softmax(-1)[0].mean(0)  # [r, stop]
            first, last = start - self._start, stop - self._start
            paid = weights[:, self._start :] @ member[:last]  # [r, C]
            self.mass[layer] += member[first:last].T @ paid
            before = torch.arange(chunks, device=key.device)[None, :] < self._chunk[first:last, None]
            self.tokens[first:last] += (paid * before).sum(1) / self._n_layers

    def facts(self, index: int) -> dict[str, tuple[float, ...]]:
        """Return what is kept of a chunk's looks.

        Args:
            index: of the chunk, from 1: the first has no chunk before it.

        Returns:
            `cci`: Cache-Craft's cache context impact in [0.5, 1], how much of what the chunk looks at lies before it.
            `inter`: attention paid to each chunk before it, sums over its tokens, means over layers and heads.
        """
        inter, intra = self.mass[:, index, :index], self.mass[:, index, index]
        length = float(self._lengths[index])
        a = float((inter / (length * self._lengths[:index])).sum(1).mean())
        b = float(intra.mean()) / length**2
        impact = 1 / (1 + math.exp(-min(a / b, 700.0))) if b > 0 else 1.0
        return {"cci": (impact,), "inter": tuple(inter.mean(0).tolist())}


NO_IMPACT = 0.5
"""Cache context impact of a chunk that looked at no other: the least there is."""


def prefix_overlap(then: Sequence[str], masses: Sequence[float], now: Sequence[str]) -> float:
    """Return Cache-Craft's adjusted prefix overlap `beta' = beta * (1 - gamma)`.

    `beta` is the share of the attention paid to earlier chunks that went to those which are before it now as well, 1 if
    none was paid; `gamma` the share of pairs of common chunks that stand the other way round.

    Args:
        then: hashes of the chunks before it at birth, in order.
        masses: attention paid to each of them.
        now: hashes of those before it in the prompt.

    Returns:
        A fraction; 0 if masses were not measured.
    """
    if len(masses) != len(then) or not then:
        return 0.0
    total = sum(masses)
    beta = sum(mass for one, mass in zip(then, masses, strict=True) if one in now) / total if total > 0 else 1.0
    return beta * (1 - kendall_distance(then, now))


def impact_of(chunk: ChunkKV) -> float:
    """Return the cache context impact (CCI) measured at a chunk's birth, in [0.5, 1]."""
    return next(iter(chunk.facts.get("cci", ())), NO_IMPACT)


def overlap_of(chunk: ChunkKV, now: Sequence[str]) -> float:
    """Return `prefix_overlap` of a chunk's context and a new one."""
    return prefix_overlap(chunk.context or (), chunk.facts.get("inter", ()), now)


def expected_overhead(chunk: ChunkKV, contexts: Sequence[Sequence[str]]) -> float:
    """Return what share of a captured chunk must be mended on average, at alpha 1: Cache-Craft's fragility.

    Args:
        chunk: as captured.
        contexts: those the same text was captured in, which stand for those to come. Its own counts besides, once.
    """
    others = [context for context in contexts if tuple(context) != chunk.context]
    lacking = sum(1 - overlap_of(chunk, context) for context in others)
    return impact_of(chunk) * lacking / (1 + len(others))


def worth_by_mending(
    found: Sequence[Slot], uses: Callable[[Slot], float], context: Sequence[str]
) -> Callable[[Slot], float]:
    """Return a worth by which the slot gives way whose uses saved least: Cache-Craft's eviction within a chunk.

    Between chunks it is the policy `cost` of `store.backends.eviction`, since `ingestion.capture_job` says the same in `saved_ms`.

    Args:
        found: all slots of one chunk.
        uses: how often a slot was used.
        context: of the cache that wants a place.
    """
    contexts = [*(slot.context for slot in found), context]
    return lambda slot: uses(slot) * (1 - expected_overhead(slot.chunk, contexts))
