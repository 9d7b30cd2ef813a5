"""Floors: what the arithmetic and the bytes of a prefill or a decode step take at rates measured on this machine.

Williams et al., Roofline (CACM 2009): work is bound by arithmetic or by bytes, whichever takes longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from qcfuse_rag.runtime.language_model import LanguageModel


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best rates found here.

    Attributes:
        flops: floating-point operations a second of a large matrix product in the model's dtype.
        memory: bytes a second of a large copy in the model's memory, read and written both counted.
        loading: bytes a second from page-locked host memory to the device; those of a copy on a CPU.
    """

    flops: float
    memory: float
    loading: float

    def or_better(self, other: Ceilings) -> Ceilings:
        """Return the better of two rates each: a machine that others use is slower at times, and never faster."""
        return Ceilings(*(max(getattr(one, field.name) for one in (self, other)) for field in fields(self)))


def measure_ceilings(lm: LanguageModel, *, samples: int = 7) -> Ceilings:
    """Measure, the best of some samples each."""
    gpu = lm.device.type == "cuda"
    size, count = (8192, 1 << 28) if gpu else (1536, 1 << 25)
    a, b = (torch.randn(size, size, dtype=lm.dtype, device=lm.device) for _ in range(2))
    product = min(seconds(lm, lambda: a @ b) for _ in range(samples))
    there, back = (torch.randn(count, device=lm.device) for _ in range(2))
    copy = min(seconds(lm, lambda: there.copy_(back)) for _ in range(samples))
    memory = 2 * there.nbytes / copy
    loading = memory / 2  # of what is copied, each byte is read and written
    if gpu:
        host = torch.empty(count, pin_memory=True)
        loading = there.nbytes / min(seconds(lm, lambda: there.copy_(host)) for _ in range(samples))
    return Ceilings(2 * size**3 / product, memory, loading)


def seconds(lm: LanguageModel, run: Callable[[], object]) -> float:
    """Time one call, what it leaves to the device included."""
    if lm.device.type == "cuda":
        torch.cuda.synchronize(lm.device)
    started = time.perf_counter()
    run()
    if lm.device.type == "cuda":
        torch.cuda.synchronize(lm.device)
    return time.perf_counter() - started


def row_operations(lm: LanguageModel, rows: float, tokens: int) -> float:
    """Return the floating-point operations of computing rows, evenly spread over a prompt, and one row of logits."""
    head = _head(lm)
    attention = sum(2 * (shape.key_dim + shape.value_dim) for shape in lm.shapes) * _heads(lm) * tokens / 2
    matrices = sum(weight.numel() for weight in _layer_weights(lm) if weight.dim() > 1)
    return rows * (2 * matrices + attention) + 2 * head.numel()


def step_bytes(lm: LanguageModel, tokens: int, requests: int = 1) -> float:
    """Return the bytes that a decode step of some requests reads: the weights once, each one's keys and values."""
    weights = sum(weight.nbytes for weight in (*_layer_weights(lm), _head(lm)))
    return weights + requests * tokens * lm.kv_bytes_per_token


def add_floors(result: dict[str, Any], ceilings: Ceilings, throttle: float) -> None:
    """Add to what was measured the best rates found so far, and how near each figure comes to what they allow.

    Args:
        result: of `measure.measure_speed`.
        ceilings: the rates.
        throttle: bytes a second of the tier of that name.
    """
    result["ceilings"] = {
        "flops": ceilings.flops,
        "memory_bytes_s": ceilings.memory,
        "loading_bytes_s": ceilings.loading,
    }
    rates = {"throttled": throttle, "device": ceilings.memory / 2}
    for row in result["prefill"]:
        row["arithmetic_s"] = row["operations"] / ceilings.flops
        row["loading_s"] = row["bytes_loaded"] / rates.get(row["tier"], ceilings.loading)
        row["of_floor"] = max(row["arithmetic_s"], row["loading_s"]) / row["ttft_s"]
    for row in result["decode"]:
        row["bytes_s"] = row["bytes"] / ceilings.memory
        row["of_floor"] = row["bytes_s"] / row["step_s"]


def _layer_weights(lm: LanguageModel) -> list[Tensor]:
    outside = {id(lm.model.get_input_embeddings().weight), id(_head(lm))}
    return [weight for weight in lm.model.parameters() if id(weight) not in outside]


def _head(lm: LanguageModel) -> Tensor:
    weight: Tensor = lm.model.get_output_embeddings().weight
    return weight


def _heads(lm: LanguageModel) -> int:
    return int(lm.model.config.get_text_config().num_attention_heads)
