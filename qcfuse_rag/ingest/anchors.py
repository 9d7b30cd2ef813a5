"""Rank a chunk's tokens by importance before any question is known.

The best of them, the anchors, stand in for the chunk when a question probes it. The ranking is the light form of KVzip
(Kim et al., arXiv 2505.23416) that QCFuse uses: an instruction to repeat the text, put behind the chunk, looks at it,
and a token is as important as the strongest look it gets from any word of the instruction, in any head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qcfuse_rag.fuse.score import attention_weights

INSTRUCTION = "\n\nRepeat the previous context exactly."
SINKS = 4


def instruction_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the instruction's token ids."""
    return tuple(tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"])


class TokenRanking:
    """Watches a pass over chunks with the instruction behind each, and orders their tokens by importance.

    The instruction sees what the chunk was prefilled behind, the chunk, and itself. The chunk's own first four tokens
    lead every ranking: they are where attention gathers when the chunk is read alone.

    Args:
        n_layers: layers of the model.
        start: position of the chunks' first token.
        lengths: tokens of each chunk.
        asking: tokens of the instruction.
        device: of the pass.
    """

    def __init__(self, n_layers: int, start: int, lengths: Sequence[int], asking: int, device: torch.device) -> None:
        self._start, self._lengths, self._asking = start, lengths, asking
        self._importance = [torch.zeros(n_layers, length, device=device) for length in lengths]

    def observe(
        self, layer: int, query: Tensor, key: Tensor, scaling: float, softcap: float | None, window: int | None
    ) -> None:
        """Note how the instructions look at their chunks in one layer; an `Observer` of `fuse.rows`.

        Args:
            layer: the layer.
            query: `[B, Hq, R, D]` of all rows, the first of which is the chunks' first token.
            key: `[B, Hkv, length, D]`.
            scaling: factor on scores.
            softcap: cap on scores, or None.
            window: sliding window in tokens, or None.
        """
        for index, tokens in enumerate(self._lengths if self._asking else ()):
            first, stop = self._start + tokens, self._start + tokens + self._asking
            weights = attention_weights(
                query[index : index + 1, :, tokens : tokens + self._asking],
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
