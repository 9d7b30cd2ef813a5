"""Measure how much the chunks of a prompt attend to each other: Cache-Craft's statistics (arXiv 2502.15734)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qcfuse_rag.methods.captures.slots import Slot, context_of, fact, kendall_distance, shared_attention
from qcfuse_rag.runtime.reference_attention import attention_scores, seen_keys
from qcfuse_rag.runtime.rows import AttentionParams
from qcfuse_rag.store.chunk import ChunkKV

MAX_SCORE_BYTES = 256 << 20


class ContextAttention:
    """Sum the attention between chunks, which are adjacent, observed in one pass over all rows of a prompt.

    Weights are softmax weights over all earlier tokens, system prefix included, mean over heads. A learned attention
    sink (gpt-oss) is ignored. Scores are computed for a block of rows at a time.

    Attributes:
        mass: `[n_layers, C, C]` float32. `mass[layer, i, j]`: total attention from the tokens of chunk i to the tokens
            of chunk j, for j <= i.
        tokens: `[T]` float32 for the positions from the first chunk's start: attention of each token to chunks before
            its own, mean over layers.
    """

    def __init__(self, n_layers: int, spans: Sequence[tuple[int, int]], device: torch.device) -> None:
        self._start, self._stop = spans[0][0], spans[-1][1]
        lengths = torch.tensor([stop - start for start, stop in spans], device=device)
        self._chunk = torch.arange(len(spans), device=device).repeat_interleave(lengths)  # chunk of each position
        self._lengths = lengths
        self._n_layers = n_layers
        self.mass = torch.zeros(n_layers, len(spans), len(spans), device=device)
        self.tokens = torch.zeros(self._stop - self._start, device=device)

    def observe(self, layer: int, query: Tensor, key: Tensor, params: AttentionParams) -> None:
        """Sum one layer's attention: query `[1, Hq, T, D]` of all rows, key `[1, Hkv, T, D]`."""
        chunks = len(self._lengths)
        member = torch.nn.functional.one_hot(self._chunk, chunks).to(torch.float32)
        step = max(1, MAX_SCORE_BYTES // (4 * query.shape[1] * self._stop))
        positions = torch.arange(self._stop, device=key.device)
        for start in range(self._start, self._stop, step):
            stop = min(start + step, self._stop)
            visible = seen_keys(positions[start:stop], positions[:stop], params.window)
            scores = attention_scores(query[:, :, start:stop], key[:, :, :stop], params.scaling, params.softcap)
            weights = scores.masked_fill_(~visible, float("-inf")).softmax(-1)[0].mean(0)  # [r, stop]
            rows = slice(start - self._start, stop - self._start)
            to_chunks = weights[:, self._start :] @ member[: rows.stop]  # [r, C]
            self.mass[layer] += member[rows].T @ to_chunks
            earlier = torch.arange(chunks, device=key.device)[None, :] < self._chunk[rows, None]
            self.tokens[rows] += (to_chunks * earlier).sum(1) / self._n_layers

    def facts(self, index: int) -> dict[str, list[float]]:
        """Return the statistics of a chunk that has earlier ones.

        `cci` is Cache-Craft's cache context impact in [0.5, 1], the weight of earlier chunks in its attention; `inter`
        the attention to each earlier chunk, sum over tokens, mean over layers and heads.
        """
        inter, intra = self.mass[:, index, :index], self.mass[:, index, index]
        length = float(self._lengths[index])
        between = float((inter / (length * self._lengths[:index])).sum(1).mean())
        within = float(intra.mean()) / length**2
        impact = 1 / (1 + math.exp(-min(between / within, 700.0))) if within > 0 else 1.0
        return {"cci": [impact], "inter": inter.mean(0).tolist()}


NO_IMPACT = 0.5
"""Cache context impact of a chunk without attention to others, the smallest value."""


def captured_overlap(chunk: ChunkKV, now: Sequence[str]) -> float:
    """Return Cache-Craft's adjusted prefix overlap `beta' = beta * (1 - gamma)` of a captured chunk with a prompt.

    `beta` is the share of its attention to earlier chunks that went to chunks which are before it now too; 1 if there
    was no such attention, 0 if it was not measured. `gamma` is the share of pairs of common chunks in reversed order.

    Args:
        chunk: the captured chunk.
        now: hashes of the earlier chunks in the prompt.
    """
    then, masses = context_of(chunk) or (), fact(chunk, "inter")
    if len(masses) != len(then) or not then:
        return 0.0
    return shared_attention(then, masses, now) * (1 - kendall_distance(then, now))


def context_impact(chunk: ChunkKV) -> float:
    """Return the cache context impact (CCI) of a captured chunk, in [0.5, 1]."""
    return next(iter(fact(chunk, "cci")), NO_IMPACT)


def expected_overhead(chunk: ChunkKV, contexts: Sequence[Sequence[str]]) -> float:
    """Return the average share of a captured chunk to recompute at alpha 1: Cache-Craft's fragility.

    The contexts that the same text was captured in are a sample of future ones. Its own context counts once.
    """
    others = [context for context in contexts if tuple(context) != context_of(chunk)]
    missing = sum(1 - captured_overlap(chunk, context) for context in others)
    return context_impact(chunk) * missing / (1 + len(others))


def worth_by_savings(
    slots: Sequence[Slot], uses: Callable[[Slot], float], context: Sequence[str]
) -> Callable[[Slot], float]:
    """Return a worth function that evicts the slot whose uses saved least: Cache-Craft's eviction within a chunk.

    Between chunks the policy `cost` of `store.backends.base` does the same, by the `saved_ms` of captures.
    """
    contexts = [*(slot.context for slot in slots), context]
    return lambda slot: uses(slot) * (1 - expected_overhead(slot.chunk, contexts))
