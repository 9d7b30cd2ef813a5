"""An attention's products of a few rows; products that read the same rows share a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from qcfuse_rag.runtime.model_views import ModuleProxy

PROJECTIONS, OUTPUT = ("q_proj", "k_proj", "v_proj"), ("o_proj",)
"""Names of the parts in transformers' models."""


class FewRowProducts:
    """Multiplies rows with several weights at once, when the product with the first weight is asked for.

    Args:
        linears: matrix products over the same channels, all with biases or all without.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._linears = linears
        self._last: tuple[Tensor, list[Tensor]] | None = None

    def product(self, index: int, rows: Tensor) -> Tensor:
        """Return the product of rows with one of the weights. Many rows are multiplied with this weight alone."""
        from qcfuse_rag.runtime.fused_layers.skinny_products import projected, supports

        last = self._last
        if last is None or last[0] is not rows:
            weights = [linear.weight for linear in self._linears]
            if not supports(rows, weights):
                return self._linears[index](rows)  # type: ignore[no-any-return]
            biases = [linear.bias for linear in self._linears if linear.bias is not None]
            last = self._last = rows, projected(rows, weights, biases or None)
        if index == len(self._linears) - 1:
            self._last = None  # hold no memory between passes
        return last[1][index]


class FewRowProduct(ModuleProxy):
    """View of a matrix product that is computed together with others.

    Args:
        inner: the model's own module.
        joint: computes the products.
        index: index of this product.
    """

    def __init__(self, inner: nn.Module, joint: FewRowProducts, index: int) -> None:
        super().__init__(inner)
        self._joint, self._index = joint, index

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the product."""
        if kwargs or len(args) != 1:
            return self.inner(*args, **kwargs)
        return self._joint.product(self._index, args[0])


def few_row_products(linears: Sequence[nn.Linear]) -> list[FewRowProduct]:
    """Return views of matrix products over the same rows. Callers must use them in this order."""
    joint = FewRowProducts(linears)
    return [FewRowProduct(linear, joint, index) for index, linear in enumerate(linears)]
