"""Rank a chunk's tokens by importance before any question is known.

The best of them, the anchors, stand in for the chunk when a question probes it. Four rankings:

- `instruction`: an instruction to repeat the text, put behind the chunk, looks at it, and a token is as important as
  the strongest look it gets from any word of the instruction, in any head. The light form of KVzip that QCFuse uses.
- `kvzip`: the chunk follows the instruction once more, and its own words look too (Kim et al., arXiv 2505.23416): twice
  the work at ingestion. Where the paper asks about long texts in pieces of 2,048 tokens, a chunk is one piece.
- `knorm`: the smaller a token's keys, the more attention it gets (Devoto et al., arXiv 2406.11430).
- `sinks`: the first tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qcfuse_rag.runtime.attention.scores import attention_weights
from qcfuse_rag.store.prefill_base import Ranking

INSTRUCTION = "\n\nRepeat the previous context exactly."
SINKS = 4


def instruction_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the instruction's token ids."""
    return tuple(tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"])


def asking_ids(ranking: Ranking, instruction: tuple[int, ...], ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return what is put behind a chunk to look at it; nothing for rankings that do not ask."""
    if ranking == "kvzip":
        return instruction + ids
    return instruction if ranking == "instruction" else ()


def order_by_key_norm(keys: Sequence[Tensor]) -> Tensor:
    """Return `[n_layers, n_tokens]` int32, tokens by the rising mean norm of their keys, the first four in front.

    Args:
        keys: per layer `[Hkv, n_tokens, D]`; a rotation does not change the norm.
    """
    norms = torch.stack([layer.float().norm(dim=-1).mean(0) for layer in keys])
    norms[:, :SINKS] = -torch.inf
    return norms.argsort(dim=1, stable=True).to(torch.int32)


def order_by_position(n_layers: int, n_tokens: int) -> Tensor:
    """Return `[n_layers, n_tokens]` int32, tokens from first to last."""
    return torch.arange(n_tokens, dtype=torch.int32).expand(n_layers, -1)


class TokenRanking:
    """Watches a pass over chunks with something behind each that looks at it, and orders their tokens by importance.

    What looks sees what the chunk was prefilled behind, the chunk, and itself. The chunk's own first four tokens
    lead every ranking: they are where attention gathers when the chunk is read alone.

    Args:
        n_layers: layers of the model.
        start: position of the chunks' first token.
        lengths: tokens of each chunk.
        asking: how many tokens look at each chunk, from behind it.
        device: of the pass.
    """

    def __init__(
        self, n_layers: int, start: int, lengths: Sequence[int], asking: Sequence[int], device: torch.device
    ) -> None:
        self._start, self._lengths, self._asking = start, lengths, asking
        self._importance = [torch.zeros(n_layers, length, device=device) for length in lengths]

    def observe(
        self, layer: int, query: Tensor, key: Tensor, scaling: float, softcap: float | None, window: int | None
    ) -> None:
        """Note how the chunks are looked at in one layer; an `Observer` of `runtime.rows`.

        Args:
            layer: the layer.
            query: `[B, Hq, R, D]` of all rows, the first of which is the chunks' first token.
            key: `[B, Hkv, length, D]`.
            scaling: factor on scores.
            softcap: cap on scores, or None.
            window: sliding window in tokens, or None.
        """
        for index, (tokens, asking) in enumerate(zip(self._lengths, self._asking, strict=True)):
            if not asking:
                continue
            first, stop = self._start + tokens, self._start + tokens + asking
            weights = attention_weights(
                query[index : index + 1, :, tokens : tokens + asking],
                key[index : index + 1, :, :stop],
                torch.arange(first, stop, device=query.device),
                torch.ones(stop, dtype=torch.bool, device=query.device),
                scaling=scaling,
                softcap=softcap,
                window=window,
                reduce="max",
            )
            self._importance[index][layer] = weights[self._start : first]

    def order(self, index: int) -> Tensor:
        """Return a chunk's tokens, `[n_layers, n_tokens]` int32 indices, most important first."""
        importance = self._importance[index]
        importance[:, :SINKS] = torch.inf
        return importance.argsort(dim=1, descending=True, stable=True).to(torch.int32)
