"""A linear layer whose weights torch keeps in the order of FBGEMM's blocks, for products on x86 processors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

PART_NUMBERS = 1 << 25
"""Most weights that are packed at a time, since FBGEMM takes and returns them in float32: an output layer over a large
vocabulary would need a GB beside the model."""


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
        self._packed: list[Any] = []

    @property
    def weight(self) -> Tensor:
        """A copy of the `[out, in]` weights as stored; on the meta device until they are packed."""
        if not self._packed:
            return torch.empty(self.out_features, self.in_features, dtype=self.stored_dtype, device="meta")
        if len(self._packed) == 1:
            return self._unpack(self._packed[0])
        weight = torch.empty(self.out_features, self.in_features, dtype=self.stored_dtype)
        for first, part in zip(range(0, self.out_features, self.part_rows), self.parts(), strict=True):
            weight[first : first + len(part)] = part
        return weight

    @property
    def nbytes(self) -> int:
        """Bytes of weights, scales and bias as they are held; a copy of the weights would take time and memory."""
        return self.in_features * self.out_features * self.stored_dtype.itemsize + sum(x.nbytes for x in self.buffers())

    @property
    def part_rows(self) -> int:
        """Output channels that are packed together; the last part may have fewer."""
        return max(1, PART_NUMBERS // self.in_features)

    def parts(self) -> Iterator[Tensor]:
        """Yield copies of the weights as stored, `part_rows` output channels at a time."""
        return map(self._unpack, self._packed)

    def pack(self, weight: Tensor, scale: Tensor | None = None) -> None:
        """Take `[out, in]` weights of the stored dtype; `scale` is for formats with scales of output channels."""
        starts = range(0, len(weight), self.part_rows)
        self.pack_parts(weight[first : first + self.part_rows] for first in starts)

    def pack_parts(self, parts: Iterable[Tensor]) -> None:
        """Take the weights of the stored dtype, `part_rows` output channels at a time."""
        self._packed = []
        for part in parts:
            first = len(self._packed) * self.part_rows
            self._packed.append(self._pack(part, slice(first, first + len(part))))

    def share(self, other: PackedLinear) -> None:
        """Take the packed weights of a layer with the same weights, scales and bias, instead of a copy."""
        self._packed = other._packed

    @abstractmethod
    def _pack(self, weight: Tensor, channels: slice) -> Any:
        """Return packed `[R, in]` weights of some output channels."""

    @abstractmethod
    def _unpack(self, packed: Any) -> Tensor: ...

    def _products(self, product: Callable[[Any], Tensor]) -> Tensor:
        """Return the `[.., out]` results of a product with each part."""
        if len(self._packed) == 1:
            return product(self._packed[0])
        return torch.cat([product(packed) for packed in self._packed], -1)

    def extra_repr(self) -> str:
        """Describe the layer's sizes like `nn.Linear`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight
