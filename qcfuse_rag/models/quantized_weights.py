"""Weights in four or eight bits, quantised by torchao or bitsandbytes as a model is loaded.

The linear layers of the decoder are quantised one at a time on the device, so that only the quantised model has to fit
there. Embeddings, the output layer and norms stay in the model's dtype. Activations, keys and values are not quantised.
`benchmarks/results/gpu.md` compares the formats.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from qcfuse_rag.errors import QCFuseError, UnsupportedModel
from qcfuse_rag.models.rope import decoder_of


def _int8(linear: nn.Linear, device: torch.device) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = linear.to(device)
    # The library's advice for torch.compile would change settings of the whole process.
    quantize_(layer, Int8WeightOnlyConfig(version=2, set_inductor_config=False))
    return layer


def _nf4(linear: nn.Linear, device: torch.device) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    layer: nn.Module = Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=linear.weight.dtype,
        compress_statistics=False,  # the library's fused products take plain scales alone
        quant_type="nf4",
        device="meta",
    )
    weight = Params4bit(
        linear.weight.detach(),
        requires_grad=False,
        compress_statistics=False,
        quant_type="nf4",
        module=layer,
    )
    layer.weight, layer.bias = weight, linear.bias
    return layer.to(device)


class QuantizedFormat(NamedTuple):
    """A format of weights: the library that has it, and the function that quantises a linear layer on a device."""

    library: str
    quantize: Callable[[nn.Linear, torch.device], nn.Module]


FORMATS = {"nf4": QuantizedFormat("bitsandbytes", _nf4), "int8_weight_only": QuantizedFormat("torchao", _int8)}
"""Formats by their library's name; torchao's float8 and int4 were slower than these (`benchmarks/results/gpu.md`)."""


def plain_linears(layers: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a decoder's layers by name; `UnsupportedModel` if there are others, as of experts."""
    linears = {name: module for name, module in layers.named_modules() if type(module) is nn.Linear}
    matrices = {name for name, weight in layers.named_parameters() if weight.dim() > 1}
    if other := matrices - {f"{name}.weight" for name in linears}:
        raise UnsupportedModel(f"layers.{min(other)} is no plain linear layer; load the model with weights='model'")
    return linears


@torch.inference_mode()
def quantize_weights(model: PreTrainedModel, weights: str, device: torch.device) -> str:
    """Quantise the linear layers of a model's decoder, one at a time, and move the model to a device.

    Returns the format with the version of its library, for fingerprints: another version may round otherwise.

    Raises:
        QCFuseError: if the library is not installed, or does not quantise on this device.
        UnsupportedModel: if the decoder has matrices that are no plain linear layers, such as experts.
    """
    chosen = FORMATS[weights]
    layers = decoder_of(model).get_submodule("layers")
    for name, module in plain_linears(layers).items():
        try:
            layers.set_submodule(name, chosen.quantize(module, device))
        except torch.OutOfMemoryError:
            raise
        except ImportError as error:
            raise QCFuseError(
                f"weights={weights!r} need {chosen.library}: run `pip install 'qcfuse-rag[quantization]'`"
            ) from error
        except Exception as error:  # of the library; which ones depends on its version, the device and the shape
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise QCFuseError(
                f"{chosen.library} does not quantise layers.{name} to {weights} on {device}: {reason}"
            ) from error
    model.to(device)
    return f"{weights}, {chosen.library} {version(chosen.library)}"
