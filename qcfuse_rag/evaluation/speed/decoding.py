"""Decode steps of one and of several requests over the same prompt, in turns with transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

from qcfuse_rag.engine.exactness_check import stock_attention
from qcfuse_rag.evaluation.speed.ceilings import seconds, step_bytes
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.graphs.decode_graphs import DecodeRunner
from qcfuse_rag.runtime.language_model import LanguageModel

STEPS = 16


def decode_steps(
    lm: LanguageModel, step: DecodeRunner, done: Prefilled, requests: Sequence[int]
) -> list[dict[str, Any]]:
    """Time steps and return plain data; the first step warms up.

    transformers' own stand beside those of a single request: a copy of all keys and values more has room there.

    Args:
        lm: the model.
        step: what computes the engine's.
        done: a prompt with room for `STEPS` tokens.
        requests: sizes of batches.
    """
    token, start = int(done.logits.argmax()), done.report.prompt_tokens
    found = []
    for n_requests in requests:
        buffers = [_copied(done.buffer) for _ in range(n_requests)]
        stock = stock_step(lm, done.buffer, start, token) if n_requests == 1 else None
        own: list[float] = []
        theirs: list[float] = []
        for position in range(start, start + STEPS):
            own.append(seconds(lm, lambda: step([token] * n_requests, [position] * n_requests, buffers)))  # noqa: B023
            if stock is not None:
                with stock_attention(lm):
                    theirs.append(seconds(lm, stock))
        step_s = median(own[1:])
        found.append(
            {
                "context": sum(len(span) for span in done.prompt.chunks),
                "requests": n_requests,
                "recorded": step.refusal is None,
                "step_s": step_s,
                "transformers_step_s": median(theirs[1:]) if theirs else None,
                "tokens_per_s": n_requests / step_s,
                "bytes": step_bytes(lm, start, n_requests),
            }
        )
    return found


def stock_step(lm: LanguageModel, buffer: KVBuffer, length: int, token: int) -> Callable[[], torch.Tensor]:
    """Return transformers' step over the same keys and values, in the cache that its `generate` takes by default."""
    cache = DynamicCache(config=lm.model.config.get_text_config())
    for layer, (keys, values) in enumerate(zip(buffer.keys, buffer.values, strict=True)):
        cache.update(keys[:, :, :length], values[:, :, :length], layer)
    ids = torch.tensor([[token]], device=lm.device)

    def step() -> torch.Tensor:
        logits: torch.Tensor = lm.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits

    return step


def _copied(buffer: KVBuffer) -> KVBuffer:
    keys, values = (tuple(layer.clone() for layer in held) for held in (buffer.keys, buffer.values))
    return KVBuffer(keys, values)
