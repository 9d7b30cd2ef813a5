"""Linear layers and embeddings with int8 weights, for CPUs: a quarter of float32's bytes, and faster products.

Weights have a scale for each output channel. Activations have a scale for each token and two int8 numbers for each
channel, 15 bits in all: `scale * (high + low / 254)`. With eight bits, the tiny differences between two ways to add up
attention move activations over a rounding edge, and each later layer makes more of them: a token's logits then depend
on the other rows of the pass by more than a standard deviation. With 15 bits that is below a hundredth. A scale for the
whole pass, as in torch's `quantize_dynamic`, is worse still: one token with large activations spoils all the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn

from qcfuse_rag.errors import QCFuseError, UnsupportedModel

if TYPE_CHECKING:  # fingerprints, and so stores, import this without a model; transformers imports slowly
    from transformers import PreTrainedModel

WeightFormat = Literal["model", "int8", "auto"]
"""`model`: as loaded, in the model's dtype; `int8`: see `Int8Linear`; `auto`: int8 on a CPU that multiplies it fast."""

LARGEST = 127
"""Largest stored number; -128 is not used, so that ranges are symmetric."""
LOW_STEPS = 254
"""Steps of the low number within one step of the high number: the low number is then within -127 and 127 as well."""
SMALLEST_SCALE = 1e-12
"""Keeps a channel or a token of zeros from dividing by zero."""
BLOCK_ROWS = 128
"""Rows that are rounded and multiplied at a time, so that intermediate results stay in the processor's cache."""


class Int8Linear(nn.Module):
    """A linear layer that multiplies int8 weights with activations rounded to 15 bits token by token.

    Sums of integers are exact in any order, so a row has the same result in every pass.

    Args:
        linear: the layer whose weights to round; it is not changed.

    Attributes:
        weight: `[out, in]` int8.
        scale: `[out]` float32; a weight is its stored number times the scale of its output channel.
        bias: `[out]` float32, or None.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight, scale = _round(linear.weight)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().float().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Compute `x @ weight.T + bias`.

        Args:
            x: `[.., in]`.

        Returns:
            `[.., out]` in the dtype of `x`.
        """
        rows = x.reshape(-1, self.in_features).float()
        if len(rows) <= BLOCK_ROWS:
            out = self._multiply(rows)
        else:
            out = torch.cat([self._multiply(block) for block in torch.split(rows, BLOCK_ROWS)])
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Describe the layer's sizes like `nn.Linear`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _multiply(self, rows: Tensor) -> Tensor:
        scale = _scale(rows)
        scaled = rows / scale
        high = scaled.round()
        numbers = torch.empty(2, *rows.shape, dtype=torch.int8)
        numbers[0].copy_(high)
        numbers[1].copy_(scaled.sub_(high).mul_(LOW_STEPS).round_())
        weight = self.weight.t()
        if len(rows) == 1:  # torch has a faster product for a single row
            out, low = (torch._int_mm(side, weight).float() for side in numbers)
        else:
            out, low = torch._int_mm(numbers.view(-1, self.in_features), weight).float().view(2, len(rows), -1)
        out = out.add_(low, alpha=1 / LOW_STEPS).mul_(scale).mul_(self.scale)
        return out if self.bias is None else out.add_(self.bias)


class Int8Embedding(nn.Module):
    """Embeddings with int8 weights and a scale for each token.

    Args:
        weight: `[vocabulary, hidden]` int8.
        scale: `[vocabulary]` float32.
        dtype: dtype of the embeddings to return.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.dtype = dtype
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the `[.., hidden]` embeddings of `[..]` token ids."""
        return (self.weight[ids] * self.scale[ids, None]).to(self.dtype)


def choose_weight_format(weights: str, device: str) -> Literal["model", "int8"]:
    """Return the format of weights on a device: `auto` is int8 on a CPU with VNNI or AMX instructions.

    Raises:
        ValueError: if there is no such format.
        QCFuseError: if int8 is asked for where it cannot be computed.
    """
    if weights not in get_args(WeightFormat):
        raise ValueError(f"weights must be {', '.join(get_args(WeightFormat))}, got {weights!r}")
    on_cpu = torch.device(device).type == "cpu"
    if weights == "auto":
        return "int8" if on_cpu and _has_onednn() and torch.cpu._is_vnni_supported() else "model"
    if weights == "int8" and not on_cpu:
        raise QCFuseError(f"weights in int8 are for CPUs; on {device} load the model with weights='model'")
    if weights == "int8" and not _has_onednn():
        raise QCFuseError("this torch multiplies int8 too slowly (no oneDNN); load the model with weights='model'")
    return "int8" if weights == "int8" else "model"


def quantize_linears(model: PreTrainedModel) -> None:
    """Replace the linear layers of a model by `Int8Linear`, one at a time, in place.

    Embeddings become `Int8Embedding`, unless their class does more than look up. Norms stay as they are.

    Raises:
        UnsupportedModel: if layers have weights outside of linear layers, such as experts; the model is unchanged then.
    """
    layers = model.get_decoder().get_submodule("layers")
    linears = {name: module for name, module in layers.named_modules() if type(module) is nn.Linear}
    covered = {f"{name}.weight" for name in linears}
    for name, parameter in layers.named_parameters():
        if parameter.dim() > 1 and name not in covered:
            raise UnsupportedModel(
                f"weights in int8 cover plain linear layers, and {type(model).__name__} has others, such as "
                f"layers.{name}; load it with weights='model'"
            )
    for name in list(linears):
        parent, _, child = name.rpartition(".")
        setattr(layers.get_submodule(parent), child, Int8Linear(linears.pop(name)))
    _quantize_vocabulary(model)


def _quantize_vocabulary(model: PreTrainedModel) -> None:
    """Round the output layer and the embeddings; embeddings that share its weights go on sharing them."""
    output, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    shared = None
    if type(output) is nn.Linear:
        rounded = Int8Linear(output)
        model.set_output_embeddings(rounded)
        if output.weight is embeddings.weight:
            shared = rounded.weight, rounded.scale
    if type(embeddings) is nn.Embedding:  # a subclass does more, such as scaling
        weight, scale = shared or _round(embeddings.weight)
        model.set_input_embeddings(Int8Embedding(weight, scale, embeddings.weight.dtype))


def weight_format(model: nn.Module) -> Literal["model", "int8"]:
    """Return the format of a loaded model's weights."""
    return "int8" if any(isinstance(module, Int8Linear) for module in model.modules()) else "model"


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _scale(rows: Tensor) -> Tensor:
    """Return the `[R, 1]` scales by which rows become numbers between -127 and 127."""
    return rows.abs().amax(-1, keepdim=True).clamp_min_(SMALLEST_SCALE).div_(LARGEST)


def _round(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the `[R, C]` int8 numbers and the `[R]` float32 scales of a matrix."""
    weight = weight.detach().float()
    scale = _scale(weight)
    return (weight / scale).round_().to(torch.int8), scale[:, 0].contiguous()
