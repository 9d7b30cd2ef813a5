"""Formats of weights on CPUs: choose a format, round a loaded model to it, and tell which format a model has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn

from qcfuse_rag.errors import QCFuseError, UnsupportedModel
from qcfuse_rag.models.source import WeightFormat
from qcfuse_rag.models.weights.float16_linear import Float16Linear
from qcfuse_rag.models.weights.int8_linear import Int8Linear, round_to_int8
from qcfuse_rag.models.weights.packed_linear import PackedLinear

if TYPE_CHECKING:  # fingerprints, and so stores, import this without a model; transformers imports slowly
    from transformers import PreTrainedModel

HeldFormat = Literal["model", "float16", "int8"]
"""A format that a loaded model can have."""
LINEARS: dict[HeldFormat, type[PackedLinear]] = {"float16": Float16Linear, "int8": Int8Linear}
PRODUCTS = ("linear_dynamic_fp16", "linear_with_input_q_dq_qweight_dq_output_fp32")
"""The products of torch that the formats use."""


class RoundedEmbedding(nn.Module):
    """Embeddings whose weights are kept in float16, or in int8 with a scale for each token.

    Args:
        weight: `[vocabulary, hidden]` float16 or int8.
        scale: `[vocabulary]` float32, or None.
        dtype: dtype of the embeddings to return.
    """

    weight: Tensor
    scale: Tensor | None

    def __init__(self, weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.dtype = dtype
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the `[.., hidden]` embeddings of `[..]` token ids."""
        rows = self.weight[ids]
        return (rows if self.scale is None else rows * self.scale[ids, None]).to(self.dtype)


def choose_weight_format(weights: str, device: str, *, bfloat16: bool = False) -> HeldFormat:
    """Return the format of weights on a device.

    Args:
        weights: see `WeightFormat`.
        device: such as `cpu` or `cuda:0`.
        bfloat16: whether the device is a CPU on which bfloat16 is faster than float32.

    Raises:
        ValueError: if there is no such format.
        QCFuseError: if a format is asked for where it cannot be computed.
    """
    if weights not in get_args(WeightFormat):
        raise ValueError(f"weights must be {', '.join(get_args(WeightFormat))}, got {weights!r}")
    on_cpu = torch.device(device).type == "cpu"
    if weights == "model" or (weights == "auto" and not (on_cpu and _has_fbgemm() and not bfloat16)):
        return "model"
    if not on_cpu:
        raise QCFuseError(
            f"weights in {weights} are for CPUs; on {device} load the model with weights='model', or a checkpoint that "
            "another library has quantised, such as bitsandbytes or torchao"
        )
    if not _has_fbgemm():
        raise QCFuseError(
            f"weights in {weights} need torch's FBGEMM: an x86 processor with AVX2, and "
            "torch.backends.quantized.engine at its default; load the model with weights='model'"
        )
    return "int8" if weights == "int8" else "float16"


def round_weights(
    model: PreTrainedModel, weights: HeldFormat, rounded: dict[nn.Module, nn.Module] | None = None
) -> None:
    """Replace linear layers and embeddings of a model, one at a time, in place.

    Norms stay as they are, and so do embeddings whose class does more than look up.

    Args:
        model: the model.
        weights: format to round to.
        rounded: layers whose weights were rounded while the model was loaded, with what replaces them; emptied.

    Raises:
        UnsupportedModel: if layers have weights outside of linear layers, such as experts, or weights too large for
            float16; the model is unchanged then.
        ValueError: if layers were rounded that are none of those.
    """
    rounded = {} if rounded is None else rounded
    refuse_other_weights(model)
    layers = model.get_decoder().get_submodule("layers")
    linears = {name: module for name, module in layers.named_modules() if type(module) is nn.Linear}
    for name, parameter in model.named_parameters():
        refuse_large_weight(name, parameter, weights)
    output, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    tied = getattr(output, "weight", None) is embeddings.weight
    for name in list(linears):
        parent, _, child = name.rpartition(".")
        linear = linears.pop(name)
        setattr(layers.get_submodule(parent), child, rounded.pop(linear, None) or round_module(linear, weights))
    table = rounded.pop(embeddings, None) or round_module(embeddings, weights)
    if type(output) is nn.Linear:
        packed = rounded.pop(output, None)
        if packed is None and tied and isinstance(table, RoundedEmbedding) and not table.weight.is_meta:
            packed = _pack_numbers(output, table, weights)
        model.set_output_embeddings(packed or round_module(output, weights))
    if table is not None:
        model.set_input_embeddings(table)
    if rounded:
        raise ValueError(f"{len(rounded)} layers were rounded that are no part of the decoder")


def _pack_numbers(output: nn.Linear, table: RoundedEmbedding, weights: HeldFormat) -> PackedLinear:
    """Return the output layer that has the weights of the embeddings, given the rounded embeddings."""
    packed = LINEARS[weights](nn.Linear(output.in_features, output.out_features, bias=False, device="meta"))
    packed.bias = None if output.bias is None else output.bias.detach().float().clone()
    packed.pack(table.weight, table.scale)
    return packed


def round_module(module: nn.Module, weights: HeldFormat) -> nn.Module | None:
    """Return what replaces a linear layer or embeddings in a format; None for other modules and for subclasses.

    A subclass does more, such as scaling.
    """
    if type(module) is nn.Linear:
        return LINEARS[weights](module)
    if type(module) is nn.Embedding:
        table = module.weight.detach()
        numbers, scale = round_to_int8(table) if weights == "int8" else (table.half(), None)
        return RoundedEmbedding(numbers, scale, table.dtype)
    return None


def refuse_other_weights(model: PreTrainedModel) -> None:
    """Refuse a model that cannot be rounded; it may be without weights, on the meta device.

    Raises:
        UnsupportedModel: if layers have weights outside of linear layers, such as experts.
    """
    layers = model.get_decoder().get_submodule("layers")
    covered = {f"{name}.weight" for name, module in layers.named_modules() if type(module) is nn.Linear}
    for name, parameter in layers.named_parameters():
        if parameter.dim() > 1 and name not in covered:
            raise UnsupportedModel(
                f"weights in float16 and int8 are those of plain linear layers, and {type(model).__name__} has others, "
                f"such as layers.{name}; load it with weights='model'"
            )


def refuse_large_weight(name: str, weight: Tensor, weights: HeldFormat) -> None:
    """Refuse a weight that a format cannot hold.

    Raises:
        UnsupportedModel: if the format is float16 and a number is too large for it.
    """
    if weights != "float16" or weight.is_meta:
        return
    largest = torch.finfo(torch.float16).max
    low, high = weight.detach().aminmax()
    if max(-float(low), float(high)) > largest:
        raise UnsupportedModel(f"{name} has weights above {largest:,.0f}; load the model with weights='model'")


def weight_format(model: nn.Module) -> HeldFormat:
    """Return the format of a loaded model's weights."""
    for module in model.modules():
        for weights, linear in LINEARS.items():
            if isinstance(module, linear):
                return weights
    return "model"


def _has_fbgemm() -> bool:
    """Return whether this torch has the products of the formats."""
    return torch.backends.quantized.engine in ("x86", "fbgemm") and all(
        hasattr(torch.ops.quantized, product) for product in PRODUCTS
    )
