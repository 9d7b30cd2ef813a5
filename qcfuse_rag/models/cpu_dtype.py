"""Choose between bfloat16 and float32 on CPUs that multiply bfloat16 numbers, by measuring both for about a second.

bfloat16 halves the bytes of weights and of caches, but rounds activations, so it has to be worth it. Without AMX or
AVX-512-BF16 torch converts each number, which is slower than float32: nothing is measured there.

The choice is in the folder `dtypes` of kept results, see `models.kept_result`: caches of one dtype are misses for the
other, so a second measurement must not decide otherwise.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from qcfuse_rag.models.kept_result import KeptResult

LOG = logging.getLogger(__name__)

SWITCH = "QCFUSE_CPU_DTYPE"
"""Environment variable that names the dtype instead of a measurement, for several machines that share a store."""
CHOICES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CHANNELS, WIDER = 2048, 8192
"""Channels before and behind the measured products: 64 MB of float32, more than most caches hold."""
PASS_ROWS, STEPS = 256, 64
"""Rows of a fused prefill, and decode steps behind it."""
WORTH = 0.8
"""bfloat16 is chosen if it takes at most this share of float32's time."""
SAMPLES = 5
"""The fastest sample of each product counts, which is disturbed least."""
INSTRUCTIONS = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
"""Functions of `torch.cpu`; older versions have fewer of them."""


def chosen_cpu_dtype() -> torch.dtype:
    """Return the faster of bfloat16 and float32 on this CPU, as measured now or kept from an earlier measurement.

    Raises:
        ValueError: if the environment names another dtype.
    """
    if named := os.environ.get(SWITCH):
        if named not in CHOICES:
            raise ValueError(f"{SWITCH} must be {' or '.join(CHOICES)}, got {named!r}")
        return CHOICES[named]
    if not multiplies_bfloat16():
        return torch.float32
    result = KeptResult("dtypes", "dtype.json", processor_name(), field="processor")
    kept = (result.read() or {}).get("dtype")
    if isinstance(kept, str) and kept in CHOICES:
        return CHOICES[kept]
    seconds = {name: answer_seconds(dtype) for name, dtype in CHOICES.items()}
    chosen = "bfloat16" if seconds["bfloat16"] <= WORTH * seconds["float32"] else "float32"
    LOG.info("%s is the faster dtype here: %s", chosen, seconds)
    result.keep(dtype=chosen, seconds=seconds)
    return CHOICES[chosen]


def multiplies_bfloat16() -> bool:
    """Return whether this CPU has AMX or AVX-512-BF16, and torch uses oneDNN, which knows them."""
    functions = (getattr(torch.cpu, name, None) for name in INSTRUCTIONS)
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and any(function is not None and function() for function in functions)


@torch.inference_mode()
def answer_seconds(dtype: torch.dtype) -> float:
    """Measure a linear layer over the rows of a prefill and over those of the steps behind it; return the seconds.

    A single row is multiplied as a vector, as passes do in bfloat16 (`runtime.fused_layers.single_row_products`).
    """
    weight, rows = torch.randn(WIDER, CHANNELS).to(dtype), torch.randn(PASS_ROWS, CHANNELS).to(dtype)
    return _fastest(linear, rows, weight) + STEPS * _fastest(torch.mv, weight, rows[0])


def _fastest(product: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor) -> float:
    product(left, right)  # pays for one-time setup
    samples = []
    for _ in range(SAMPLES):
        started = time.perf_counter()
        product(left, right)
        samples.append(time.perf_counter() - started)
    return min(samples)


def processor_name() -> str:
    """Return the name of the processor, under which the chosen dtype is kept.

    The number of threads and the version of torch also affect the speed. They are not part of the name: another dtype
    would make the stored caches misses.
    """
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"
