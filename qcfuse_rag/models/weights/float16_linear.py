"""Linear layers with float16 weights for CPUs: half of float32's bytes, and the same sums in float32.

A step that computes one row takes as long as reading the weights, so half the bytes are nearly half the time. FBGEMM
widens the weights to float32 as it reads them; activations are not rounded. Weights that a checkpoint has in bfloat16
or float16 keep their values, but for those below 6e-8.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qcfuse_rag.models.weights.packed_linear import PackedLinear


class Float16Linear(PackedLinear):
    """A linear layer with float16 weights and float32 activations and sums.

    Args:
        linear: the layer whose weights to round; it is not changed. On the meta device, `pack` gives the weights later.
    """

    stored_dtype: ClassVar[torch.dtype] = torch.float16

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        if not linear.weight.is_meta:
            self.pack(linear.weight.detach())

    def _pack(self, weight: Tensor, channels: slice) -> Any:
        bias = None if self.bias is None else self.bias[channels]
        return torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)

    def _unpack(self, packed: Any) -> Tensor:
        weight: Tensor = torch.ops.quantized.linear_unpack_fp16(packed)[0]
        return weight.half()

    def forward(self, x: Tensor) -> Tensor:
        """Compute `x @ weight.T + bias`.

        Args:
            x: `[.., in]`.

        Returns:
            `[.., out]` in the dtype of `x`.
        """
        rows = x.float()
        return self._products(lambda packed: torch.ops.quantized.linear_dynamic_fp16(rows, packed)).to(x.dtype)
