"""Choose how CPUs compute: bfloat16, float16 weights or float32, by measuring each for about a second.

bfloat16 halves the bytes of weights and of caches, but rounds activations. Float16 weights halve the bytes that a
decode step waits for, and leave activations and sums in float32 (`benchmarks/results/weights.md`). What torch refuses
here, or converts number by number, is found by trying it, and is not measured.

Caches of one dtype are misses for the other, so the choice is cached (`models.result_cache`): a second measurement must
not decide otherwise. Float16 weights are float32 to a cache: what a checkpoint has in 16 bits keeps its value, but for
numbers below 6e-8.
"""

from __future__ import annotations

import copy
import logging
import os
import platform
import timeit
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from qcfuse_rag.errors import QCFuseError, UnsupportedModel
from qcfuse_rag.models.quantized_weights import plain_linears
from qcfuse_rag.models.result_cache import CachedResult
from qcfuse_rag.models.rope import decoder_of

LOG = logging.getLogger(__name__)

SWITCH = "QCFUSE_CPU_DTYPE"
"""Environment variable that names the choice instead of a measurement, for several machines that share a store."""
CHOICES = ("bfloat16", "float16", "float32")
CHANNELS, WIDER = 2048, 8192
"""Channels before and behind the measured products: 64 MB of float32, more than most caches hold."""
PASS_ROWS, STEPS = 256, 64  # rows of a fused prefill, and decode steps behind it
PACKED_ROWS = 64
"""Rows that oneDNN packs weights for; other numbers of rows are multiplied as fast."""
WORTH = 0.8
"""A choice other than float32 takes at most this share of float32's time."""
SAMPLES = 5
"""The fastest sample of each product counts, which is disturbed least."""
TRIED_CHANNELS, CONVERTED = 512, 2.0
"""Channels that are tried, and the share of plain float32's time below which torch does not convert each number: packed
products take 0.2 to 1.4 of it, converted ones 2.9 to 9 (Xeon with AMX, AVX-512, AVX2 or SSE alone, 2026-11-29)."""


def fastest_cpu_format() -> str:
    """Return the member of `CHOICES` for this CPU, as measured now or before, or as the environment names it."""
    if named := os.environ.get(SWITCH):
        if named not in CHOICES:
            raise ValueError(f"{SWITCH} must be {', '.join(CHOICES)}, got {named!r}")
        if named == "float16" and not multiplies(named):
            LOG.warning("torch multiplies no float16 weights here: float32 is used; %s=float32 is the same", SWITCH)
            return "float32"
        return named
    result = CachedResult("dtypes", "dtype.json", processor_name(), field="processor")
    found = (result.read() or {}).get("dtype")
    if found in CHOICES:  # another choice would make caches of this one misses
        return str(found)
    possible = [name for name in CHOICES if name == "float32" or multiplies(name)]
    if possible == ["float32"]:
        return "float32"
    seconds = {name: answer_seconds(name) for name in possible}
    chosen = next(name for name in seconds if name == "float32" or seconds[name] <= WORTH * seconds["float32"])
    LOG.info("%s is the fastest here: %s", chosen, seconds)
    result.write(dtype=chosen, seconds=seconds)
    return chosen


@cache
def multiplies(name: str) -> bool:
    """Return whether torch multiplies by packed weights in a format here, without converting each number."""
    plain, packed = (partial(_product, kind, PACKED_ROWS, TRIED_CHANNELS) for kind in ("plain", name))
    return takes_at_most(CONVERTED, plain(), packed)


@torch.inference_mode()
def takes_at_most(share: float, usual: Callable[[], object], make: Callable[[], Callable[[], object]]) -> bool:
    """Return whether what `make` returns works here, in this share of the usual way's time, by trying both."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # other programs may use the other cores
    try:
        return _fastest(make()) <= share * _fastest(usual)
    except (AttributeError, RuntimeError):  # this torch has no such function, or not for this processor
        return False
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
def answer_seconds(name: str) -> float:
    """Measure a linear layer over the rows of a prefill and over those of the steps behind it; return the seconds."""
    kind = name if multiplies(name) else "plain"
    return sum(times * _fastest(_product(kind, rows, CHANNELS, WIDER)) for times, rows in ((1, PASS_ROWS), (STEPS, 1)))


def _product(kind: str, rows: int, channels: int, wider: int = TRIED_CHANNELS) -> Callable[[], Tensor]:
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    linear = nn.Linear(channels, wider, bias=False, dtype=dtype)
    layer = linear if kind == "plain" else Float16Linear(linear) if kind == "float16" else PackedLinear(linear)
    return partial(layer, torch.randn(rows, channels, dtype=dtype))


def _fastest(work: Callable[[], object]) -> float:
    work()  # pays for one-time setup
    return min(timeit.repeat(work, number=1, repeat=SAMPLES))


def processor_name() -> str:
    """Return the name of the processor; threads and torch's version, which another choice may suit, are no part."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


class PackedLinear(nn.Linear):
    """A linear layer whose weights lie in the order in which oneDNN reads them.

    torch's own product sorts them each time, which for a few bfloat16 rows takes as long as the product itself.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKED_ROWS)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weights in the usual order, a copy."""
        return self._packed.to_dense()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Map `[.., in]` to `[.., out]`; gradients and other dtypes take the usual order."""
        if x.requires_grad or x.dtype != self._packed.dtype:
            return functional.linear(x, self.weight.to(x.dtype), self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        """Return a layer that shares the packed weights, which nothing changes."""
        layer = copy.copy(self)
        layer._parameters = copy.deepcopy(self._parameters, memo)
        return layer

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight


def pack_linears(model: nn.Module) -> None:
    """Replace a model's plain linear layers by `PackedLinear`, one at a time, where that is no slower.

    An output layer that shares the embeddings' weights gets a copy of them.
    """
    dtypes = {getattr(torch, name) for name in ("bfloat16", "float32") if multiplies(name)}
    for name, module in list(model.named_modules()):
        # torchao's weights are of another type, and say that they are float32 or bfloat16.
        if type(module) is nn.Linear and type(module.weight) is nn.Parameter and module.weight.dtype in dtypes:
            model.set_submodule(name, PackedLinear(module))


class Float16Linear(nn.Module):
    """A copy of a linear layer with float16 weights, which FBGEMM widens as it reads them; sums are in float32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach(), linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[.., in]` to `[.., out]`, both float32."""
        return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)  # type: ignore[no-any-return]


def pack_float16(model: PreTrainedModel) -> None:
    """Replace the plain linear layers of a float32 model, one at a time; embeddings and other weights stay.

    Raises:
        QCFuseError: if this torch has no such products here.
        UnsupportedModel: if a weight is too large for float16, or the layers' weights are not those of plain linear
            layers, such as experts; the model is unchanged then.
    """
    if not multiplies("float16"):
        raise QCFuseError("torch multiplies no float16 weights on this processor; use weights='model'")
    layers = decoder_of(model).get_submodule("layers")
    linears = plain_linears(layers)
    for name, weight in layers.named_parameters():
        if weight.dtype != torch.float32 or float(weight.detach().abs().max()) > torch.finfo(torch.float16).max:
            raise UnsupportedModel(f"layers.{name} does not fit float16; load the model with weights='model'")
    for name, module in linears.items():
        layers.set_submodule(name, Float16Linear(module))
    output = model.get_output_embeddings()
    if type(output) is nn.Linear:
        model.set_output_embeddings(Float16Linear(output))


def has_float16_weights(model: nn.Module) -> bool:
    """Return whether a model is one of `pack_float16`."""
    return any(isinstance(module, Float16Linear) for module in model.modules())
