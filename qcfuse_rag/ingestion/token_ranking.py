"""Rank a chunk's tokens by importance before any question is known.

The best tokens, the anchors, represent the chunk when a question probes it. Four rankings:

- `instruction`: an instruction to repeat the text follows the chunk. A token's importance is the largest attention
  weight it gets from any token of the instruction in any head. The light form of KVzip that QCFuse uses.
- `kvzip`: the instruction is followed by the chunk again, whose tokens count too (Kim et al., arXiv 2505.23416).
  Doubles the work of ingestion. The paper asks about long texts in pieces of 2,048 tokens; here a chunk is one piece.
- `knorm`: tokens with smaller keys get more attention (Devoto et al., arXiv 2406.11430).
- `sinks`: the first tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qcfuse_rag.runtime.attention.scores import attention_weights
from qcfuse_rag.runtime.rows import AttentionParams
from qcfuse_rag.store.prefill_base import Ranking

INSTRUCTION = "\n\nRepeat the previous context exactly."
SINKS = 4


def instruction_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the token ids of the ranking instruction."""
    return tuple(tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"])


def query_ids(ranking: Ranking, instruction: tuple[int, ...], ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the token ids behind a chunk whose attention ranks it; empty for rankings without a query."""
    if ranking == "kvzip":
        return instruction + ids
    return instruction if ranking == "instruction" else ()


def order_by_key_norm(keys: Sequence[Tensor]) -> Tensor:
    """Rank tokens by rising mean norm of their keys, after the first four; `[n_layers, n_tokens]` int32.

    Args:
        keys: per layer `[Hkv, n_tokens, D]`, rotated or not.
    """
    norms = torch.stack([layer.float().norm(dim=-1).mean(0) for layer in keys])
    norms[:, :SINKS] = -torch.inf
    return norms.argsort(dim=1, stable=True).to(torch.int32)


def order_by_position(n_layers: int, n_tokens: int) -> Tensor:
    """Rank tokens from first to last; `[n_layers, n_tokens]` int32."""
    return torch.arange(n_tokens, dtype=torch.int32).expand(n_layers, -1)


class TokenRanking:
    """Rank chunks' tokens by the attention of query tokens behind them, observed in one pass.

    The query tokens attend to the chunk's prefix, the chunk and themselves. The chunk's first four tokens lead every
    ranking, because attention gathers there when the chunk is read alone.

    Args:
        n_layers: layers of the model.
        start: position of the chunks' first token.
        lengths: tokens of each chunk.
        query_lengths: number of query tokens behind each chunk.
        device: device of the pass.
    """

    def __init__(
        self, n_layers: int, start: int, lengths: Sequence[int], query_lengths: Sequence[int], device: torch.device
    ) -> None:
        self._start, self._lengths, self._query_lengths = start, lengths, query_lengths
        self._importance = [torch.zeros(n_layers, length, device=device) for length in lengths]

    def observe(self, layer: int, query: Tensor, key: Tensor, params: AttentionParams) -> None:
        """Record the attention that the chunks get in one layer; an `Observer` of `runtime.rows`.

        Args:
            layer: the layer.
            query: `[B, Hq, R, D]` of all rows; the first row is the chunks' first token.
            key: `[B, Hkv, length, D]`.
            params: how the layer computes scores.
        """
        for index, (tokens, n_queries) in enumerate(zip(self._lengths, self._query_lengths, strict=True)):
            if not n_queries:
                continue
            first, stop = self._start + tokens, self._start + tokens + n_queries
            weights = attention_weights(
                query[index : index + 1, :, tokens : tokens + n_queries],
                key[index : index + 1, :, :stop],
                torch.arange(first, stop, device=query.device),
                torch.ones(stop, dtype=torch.bool, device=query.device),
                params,
                reduce="max",
            )
            self._importance[index][layer] = weights[self._start : first]

    def order(self, index: int) -> Tensor:
        """Return a chunk's tokens, `[n_layers, n_tokens]` int32 indices, most important first."""
        importance = self._importance[index]
        importance[:, :SINKS] = torch.inf
        return importance.argsort(dim=1, descending=True, stable=True).to(torch.int32)
