"""Choose how CPUs compute: bfloat16, float16 weights or float32, by measuring each for about a second.

bfloat16 halves the bytes of weights and of caches, but rounds activations, and without AMX or AVX-512-BF16 torch
converts each number: it is measured only where the processor multiplies such numbers. Float16 weights halve the bytes
that a decode step waits for, and leave activations and sums in float32 (`benchmarks/results/weights.md`).

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


def fastest_cpu_format() -> str:
    """Return the member of `CHOICES` for this CPU, as measured now or before, or as the environment names it."""
    if named := os.environ.get(SWITCH):
        if named not in CHOICES:
            raise ValueError(f"{SWITCH} must be {', '.join(CHOICES)}, got {named!r}")
        return named
    possible = {"bfloat16": multiplies_bfloat16(), "float16": multiplies_float16_weights()}
    if not any(possible.values()):
        return "float32"
    result = CachedResult("dtypes", "dtype.json", processor_name(), field="processor")
    found = (result.read() or {}).get("dtype")
    if found in CHOICES and possible.get(found, True):
        return str(found)
    seconds = {name: answer_seconds(name) for name in CHOICES if possible.get(name, True)}
    chosen = next(name for name in seconds if name == "float32" or seconds[name] <= WORTH * seconds["float32"])
    LOG.info("%s is the fastest here: %s", chosen, seconds)
    result.write(dtype=chosen, seconds=seconds)
    return chosen


def multiplies_bfloat16() -> bool:
    """Return whether this CPU has AMX or AVX-512-BF16, and torch uses oneDNN, which knows them."""
    names = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")  # older versions of torch have fewer of them
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and any(hasattr(torch.cpu, name) and getattr(torch.cpu, name)() for name in names)


def multiplies_float16_weights() -> bool:
    """Return whether this torch has FBGEMM's products of float16 weights: x86 processors with AVX2."""
    has_products = hasattr(torch.ops.quantized, "linear_dynamic_fp16")
    return torch.backends.quantized.engine in ("x86", "fbgemm") and has_products


@torch.inference_mode()
def answer_seconds(name: str) -> float:
    """Measure a linear layer over the rows of a prefill and over those of the steps behind it; return the seconds."""
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    linear, rows = nn.Linear(CHANNELS, WIDER, bias=False, dtype=dtype), torch.randn(PASS_ROWS, CHANNELS, dtype=dtype)
    layer = Float16Linear(linear) if name == "float16" else PackedLinear(linear)
    return _fastest(layer, rows) + STEPS * _fastest(layer, rows[:1])


def _fastest(product: Callable[..., Tensor], *operands: object) -> float:
    product(*operands)  # pays for one-time setup
    return min(timeit.repeat(lambda: product(*operands), number=1, repeat=SAMPLES))


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
    """Replace a model's plain linear layers by `PackedLinear`, one at a time, where oneDNN multiplies their dtype.

    An output layer that shares the embeddings' weights gets a copy of them.
    """
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_onednn or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return
    dtypes = {torch.float32, torch.bfloat16} if multiplies_bfloat16() else {torch.float32}
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
        QCFuseError: if this torch has no such products.
        UnsupportedModel: if a weight is too large for float16, or the layers' weights are not those of plain linear
            layers, such as experts; the model is unchanged then.
    """
    if not multiplies_float16_weights():
        raise QCFuseError("float16 weights need torch's FBGEMM, on an x86 processor with AVX2; use weights='model'")
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
