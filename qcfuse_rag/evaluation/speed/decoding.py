"""Time decode steps of one and of several requests, in turns with transformers' own steps."""

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
    lm: LanguageModel, decodes: DecodeRunner, prefilled: Prefilled, requests: Sequence[int]
) -> list[dict[str, Any]]:
    """Time decode steps of a prefilled prompt for each batch size; the first of `STEPS` steps is a warm-up.

    transformers' steps are timed for a single request only: there is memory for one more copy of the keys and values.
    """
    token, start = int(prefilled.logits.argmax()), prefilled.report.prompt_tokens
    rows = []
    for n_requests in requests:
        buffers = [_clone(prefilled.buffer) for _ in range(n_requests)]
        stock = stock_step(lm, prefilled.buffer, start, token) if n_requests == 1 else None
        engine_s: list[float] = []
        stock_s: list[float] = []
        for position in range(start, start + STEPS):
            engine_s.append(
                seconds(lm, lambda: decodes([token] * n_requests, [position] * n_requests, buffers))  # noqa: B023
            )
            if stock is not None:
                with stock_attention(lm):
                    stock_s.append(seconds(lm, stock))
        step_s = median(engine_s[1:])
        rows.append(
            {
                "context": sum(len(span) for span in prefilled.prompt.chunks),
                "requests": n_requests,
                "recorded": decodes.refusal is None,
                "step_s": step_s,
                "transformers_step_s": median(stock_s[1:]) if stock_s else None,
                "tokens_per_s": n_requests / step_s,
                "bytes": step_bytes(lm, start, n_requests),
            }
        )
    return rows


def stock_step(lm: LanguageModel, buffer: KVBuffer, length: int, token: int) -> Callable[[], torch.Tensor]:
    """Return transformers' decode step over the same keys and values, in the default cache of its `generate`."""
    cache = DynamicCache(config=lm.model.config.get_text_config())
    for layer, (keys, values) in enumerate(zip(buffer.keys, buffer.values, strict=True)):
        cache.update(keys[:, :, :length], values[:, :, :length], layer)
    ids = torch.tensor([[token]], device=lm.device)

    def step() -> torch.Tensor:
        logits: torch.Tensor = lm.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits

    return step


def _clone(buffer: KVBuffer) -> KVBuffer:
    keys, values = (tuple(layer.clone() for layer in layers) for layers in (buffer.keys, buffer.values))
    return KVBuffer(keys, values)
