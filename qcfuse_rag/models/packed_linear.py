"""A linear layer whose weights torch keeps in the order of FBGEMM's blocks, for products on x86 processors."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """A linear layer without its weights as a matrix: they are packed for the product.

    The state has them as a matrix, so a fingerprint and a checkpoint do not depend on the order of blocks.

    Args:
        linear: the layer to take the sizes and the bias from; it is not changed.

    Attributes:
        stored_dtype: dtype of the numbers that are packed.
        bias: `[out]` float32, or None.
    """

    stored_dtype: ClassVar[torch.dtype]
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().float().clone())
        self._packed: torch.ScriptObject | None = None

    @property
    def weight(self) -> Tensor:
        """A copy of the `[out, in]` weights as stored; on the meta device until they are packed."""
        if self._packed is None:
            return torch.empty(self.out_features, self.in_features, dtype=self.stored_dtype, device="meta")
        return self._unpack()

    @abstractmethod
    def pack(self, weight: Tensor, scale: Tensor | None = None) -> None:
        """Take `[out, in]` weights of the stored dtype, and scales of output channels unless the layer has them."""

    def share(self, other: PackedLinear) -> None:
        """Take the packed weights of a layer with the same weights, scales and bias, instead of a copy."""
        self._packed = other._packed

    @abstractmethod
    def _unpack(self) -> Tensor: ...

    def extra_repr(self) -> str:
        """Describe the layer's sizes like `nn.Linear`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight
