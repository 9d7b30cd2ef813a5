"""A view of a model for CPUs whose products of a single bfloat16 row are torch's matrix-vector products.

A decode step waits for the bytes of the weights. torch's product of two bfloat16 matrices rearranges them first, which
for a single row takes as long again as reading them; its product with a vector does not.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from qcfuse_rag.runtime.fused_layers.fused_modules import is_product, view_of
from qcfuse_rag.runtime.model_views import ModuleProxy

Module = TypeVar("Module", bound=nn.Module)


class SingleRowProduct(ModuleProxy):
    """View of a linear layer that multiplies a single row as a vector; other rows go to the layer."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer returns, with sums in another order."""
        linear: Any = self.inner
        if kwargs or len(args) != 1 or args[0].numel() != linear.in_features:
            return linear(*args, **kwargs)
        rows: Tensor = args[0]
        row, weight, bias = rows.reshape(-1), linear.weight, linear.bias
        out = torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)
        return out.view(*rows.shape[:-1], -1)


def single_row_view(module: Module) -> Module:
    """Return a view of a module in which linear layers in bfloat16 are `SingleRowProduct`; it shares the weights."""
    parts = {name: child and _part(child) for name, child in module._modules.items()}
    return view_of(module, parts)  # type: ignore[return-value]


def _part(module: nn.Module) -> nn.Module:
    if is_product(module):
        return SingleRowProduct(module) if module.weight.dtype == torch.bfloat16 else module
    return single_row_view(module) if module._modules else module
