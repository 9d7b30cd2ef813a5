"""Products of int8 weights with activations of 7 bits: by oneDNN with VNNI or AMX instructions, otherwise by FBGEMM.

Both add up integers exactly, so they give the same numbers, and stored caches may be read on either kind of processor.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

ZERO_POINT = 64
"""Added to activations, which both libraries take as unsigned numbers."""


class Int8Weights(ABC):
    """Weights of some output channels, in the order of blocks that a library multiplies."""

    @abstractmethod
    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        """Pack `[R, in]` int8 weights with the `[R]` float32 scales of their channels."""

    @abstractmethod
    def numbers(self) -> Tensor:
        """Return a copy of the `[R, in]` int8 weights."""

    @abstractmethod
    def multiply(self, high: Tensor, low: Tensor) -> Tensor:
        """Multiply two numbers of each activation, which take the same time as one matrix of twice as many rows.

        Args:
            high: `[rows, in]` float32, whole numbers from -63 to 63.
            low: the same.

        Returns:
            `[2 * rows, R]` float32, the products of `high` and then those of `low`.
        """


class FbgemmWeights(Int8Weights):
    """Weights for the product that torch has on every x86 processor with AVX2."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        zeros = torch.zeros(len(weight), dtype=torch.long)
        with warnings.catch_warnings():  # torch says that a later version will have no tensors of this kind
            warnings.simplefilter("ignore", UserWarning)
            tensor = torch._make_per_channel_quantized_tensor(weight, scale.double(), zeros, 0)
            self._packed = torch.ops.quantized.linear_prepack(tensor, None)

    def numbers(self) -> Tensor:
        """See `Int8Weights`."""
        weight: Tensor = torch.ops.quantized.linear_unpack(self._packed)[0]
        return weight.int_repr()

    def multiply(self, high: Tensor, low: Tensor) -> Tensor:
        """See `Int8Weights`."""
        product: Any = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        return product(torch.cat((high, low)), 1.0, ZERO_POINT, self._packed)  # type: ignore[no-any-return]


class OnednnWeights(Int8Weights):
    """Weights for the product of processors with VNNI or AMX instructions."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self._packed = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
        self._scale, self._zeros = scale, torch.zeros(len(weight), dtype=torch.long)

    def __deepcopy__(self, memo: dict[int, Any]) -> OnednnWeights:
        """Return a copy; torch does not copy packed weights."""
        return OnednnWeights(self.numbers(), self._scale.clone())

    def numbers(self) -> Tensor:
        """See `Int8Weights`."""
        return self._packed.to_dense().t().contiguous()  # type: ignore[no-any-return]

    def multiply(self, high: Tensor, low: Tensor) -> Tensor:
        """See `Int8Weights`."""
        rows = len(high)
        both = torch.empty(2 * rows, high.shape[1], dtype=torch.int8)
        both[:rows], both[rows:] = high, low
        unsigned = both.add_(ZERO_POINT).view(torch.uint8)
        return torch.ops.onednn.qlinear_pointwise(  # type: ignore[no-any-return]
            unsigned,
            1.0,
            ZERO_POINT,
            self._packed,
            self._scale,
            self._zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )


def packed_class() -> type[Int8Weights]:
    """Return the class of the faster product on this processor."""
    return OnednnWeights if has_vnni() else FbgemmWeights


def has_vnni() -> bool:
    """Return whether oneDNN has instructions for products of 8 bits here; older versions of torch cannot tell."""
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return onednn and supported is not None and bool(supported())
