"""Fit a calibration: one bias per head.

With it, passages in a fused cache get the attention that they get under full prefill.

The same rows, a question and full prefill's greedy answer, are computed over full prefill's caches and over fused ones.
In each layer and head, the share of a row's attention on the passages is `m`. Adding `b` to the scores on the passages
turns the odds `m / (1 - m)` into `exp(b) * m / (1 - m)`. So the bias is the mean difference of the log-odds: a closed
form, without labels and without gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qcfuse_rag.fusion.calibration import Calibration
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_hidden
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.reference_attention import attention_scores, seen_keys
from qcfuse_rag.runtime.rows import AttentionParams, RowsPlan
from qcfuse_rag.store.key import hash_ids

LEAST_SHARE = 1e-6
"""Attention shares are kept at least this far from 0 and 1, so that their log-odds are finite."""

DECIMALS = 4
"""Decimals of a bias that are kept; a ten-thousandth changes no answer and keeps the file small."""


@torch.inference_mode()
def passage_odds(lm: LanguageModel, prompt: Prompt, buffer: KVBuffer, answer: Sequence[int], first: int) -> Tensor:
    """Measure the attention that the text behind the passages and an answer pay to the passages.

    The rows are computed again over the buffer, which changes nothing but the answer's positions.

    Args:
        lm: the model.
        prompt: the prompt, with at least one passage.
        buffer: its keys and values, with capacity for the answer.
        answer: token ids of the answer; the last one is not computed.
        first: the first position of the passages to count.

    Returns:
        `[n_layers, Hq]` float32, mean log-odds of the share of attention on positions from `first` to the last passage.
    """
    start = max(span.stop for span in prompt.chunks)
    stop = max(start + 1, len(prompt) + len(answer) - 1)
    odds: list[Tensor] = []

    def observe(_layer: int, query: Tensor, key: Tensor, params: AttentionParams) -> None:
        seen = seen_keys(plan.rows, torch.arange(key.shape[2], device=key.device), params.window)
        scores = attention_scores(query, key, params.scaling, params.softcap).masked_fill_(~seen, float("-inf"))
        share = scores.softmax(-1)[0, :, :, first:start].sum(-1)
        odds.append(share.clamp(LEAST_SHARE, 1 - LEAST_SHARE).logit().mean(-1))

    ids = torch.tensor([*prompt.ids, *answer][start:stop], device=lm.device)
    plan = RowsPlan.between(start, stop, lm.device, lm.sliding, observe)
    forward_hidden(lm, ids, plan, buffer, depth=lm.n_layers)
    return torch.stack(odds)


def fit_calibration(prefix_ids: tuple[int, ...], full: Sequence[Tensor], fused: Sequence[Tensor]) -> Calibration:
    """Return the biases that give fused passages full prefill's attention, in the mean over prompts.

    Args:
        prefix_ids: the system prefix of all prompts.
        full: `passage_odds` of each prompt over full prefill's caches; at least one.
        fused: those over the fused caches, of the same prompts.
    """
    gap = torch.stack([*full]) - torch.stack([*fused])
    biases = gap.mean(0).cpu().double().tolist()
    return Calibration(tuple(tuple(round(bias, DECIMALS) for bias in layer) for layer in biases), hash_ids(prefix_ids))
