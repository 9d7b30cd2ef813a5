"""Linear layers with int8 weights, for CPUs: a quarter of float32's bytes, and faster products of few rows.

Products are those of oneDNN on processors with VNNI or AMX instructions, which are some twice as fast there, and of
FBGEMM on others (`models.weights.int8_products`). Without VNNI, FBGEMM adds pairs of products in 16 bits, so
activations may have 7 bits.

Weights have a scale for each output channel. Activations have a scale for each token and two 7-bit numbers for each
channel, 13 bits in all: `scale * (high + low / 126)`. With eight bits, the tiny differences between two ways to add up
attention move activations over a rounding edge, and each later layer makes more of them: a token's logits then depend
on the other rows of the pass by more than a standard deviation. With 13 bits that is below a hundredth. A scale for the
whole pass, as in torch's `quantize_dynamic`, is worse still: one token with large activations spoils all the others.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from qcfuse_rag.models.weights.int8_products import Int8Weights, packed_class
from qcfuse_rag.models.weights.packed_linear import PackedLinear

LARGEST_WEIGHT = 127
"""Largest stored weight; -128 is not used, so that ranges are symmetric."""
LARGEST_ACTIVATION = 63
"""Largest number of an activation: two products of 7 bits and 8 bits fit into 16 bits."""
LOW_STEPS = 126
"""Steps of the low number within one step of the high number: the low number is then within -63 and 63 as well."""
STEP = 1 / LARGEST_ACTIVATION
"""Between two numbers of an activation, which is at most 1 after its token's scale."""
SMALLEST = 1e-12
"""Keeps a channel or a token of zeros from dividing by zero."""
BLOCK_ROWS = 128
"""Rows that are rounded and multiplied at a time, so that intermediate results stay in the processor's cache."""
ROUNDED_ROWS = 8192
"""Rows of weights that are rounded at a time: embeddings of a large vocabulary fill most of a model's memory."""


class Int8Linear(PackedLinear):
    """A linear layer that multiplies int8 weights with activations rounded to 13 bits token by token.

    Sums of integers are exact in any order, so a row has the same result in every pass.

    Args:
        linear: the layer whose weights to round; it is not changed. On the meta device, `pack` gives the weights later.

    Attributes:
        scale: `[out]` float32; a weight is its stored number times the scale of its output channel.
    """

    stored_dtype: ClassVar[torch.dtype] = torch.int8
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight, scale = round_to_int8(linear.weight)
        self.register_buffer("scale", scale)
        if not weight.is_meta:
            self.pack(weight)

    def pack(self, weight: Tensor, scale: Tensor | None = None) -> None:
        """Take `[out, in]` int8 weights, and `[out]` float32 scales unless the layer has them."""
        self.scale = self.scale if scale is None else scale
        super().pack(weight)

    def _pack(self, weight: Tensor, channels: slice) -> Int8Weights:
        return packed_class()(weight, self.scale[channels])

    def _unpack(self, packed: Int8Weights) -> Tensor:
        return packed.numbers()

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

    def _multiply(self, rows: Tensor) -> Tensor:
        count = len(rows)
        largest = rows.abs().amax(-1, keepdim=True).clamp_min_(SMALLEST)
        scaled = rows * (LARGEST_ACTIVATION / largest)
        high = scaled.round()
        low = scaled.sub_(high).mul_(LOW_STEPS).round_()
        sums = self._products(lambda packed: packed.multiply(high, low))
        out = sums[:count].add_(sums[count:], alpha=1 / LOW_STEPS).mul_(largest.mul_(STEP))
        return out if self.bias is None else out.add_(self.bias)


def round_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the `[R, C]` int8 numbers and the `[R]` float32 scales of a matrix."""
    blocks = [_round_rows(rows.float()) for rows in torch.split(weight.detach(), ROUNDED_ROWS)]
    return torch.cat([numbers for numbers, _ in blocks]), torch.cat([scale for _, scale in blocks])


def _round_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(-1, keepdim=True).clamp_min_(SMALLEST).div_(LARGEST_WEIGHT)
    return (weight / scale).round_().to(torch.int8), scale[:, 0]
