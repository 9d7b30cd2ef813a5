"""What one of torch's operations does with memory: which tensors it reads and writes, and whether the host waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

WAITING = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::allclose",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
"""Whose result, or its size, the host has to know."""
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
CONVERTING = {"aten::to", "aten::cpu", "aten::cuda", "aten::type_as"}
FILLING = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_"}
"""Which do not read what they write."""


def tensors_in(value: Any) -> list[Tensor]:
    return [one for one in tree_flatten(value)[0] if isinstance(one, Tensor)]


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A call of one of torch's operations, with tensors on the CPU in it."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.func._schema.name)

    def compute(self) -> Any:
        args = self.args
        if self.name == "aten::histc" and not args[0].is_floating_point():  # which is CUDA's alone
            return self.func(args[0].float(), *args[1:], **self.kwargs).to(args[0].dtype)
        return self.func(*args, **self.kwargs)

    def written(self) -> list[Tensor]:
        """Return the tensors it writes that were there before."""
        found: list[Tensor] = []
        if self.func._schema.is_mutable:
            for place, argument in enumerate(self.func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = self.kwargs.get(argument.name)
                    found += tensors_in(self.args[place] if place < len(self.args) else given)
        return found

    def reads(self) -> list[Tensor]:
        """Return the tensors whose numbers it needs."""
        if "empty" in self.name or self.name.endswith("_like") or "::new_" in self.name:
            return []
        skipped = {id(one) for one in self.written()} if self.name in FILLING else set()
        return [one for one in tensors_in((self.args, self.kwargs)) if id(one) not in skipped]

    def fresh(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Return the results that lie in memory of their own."""
        given = {one.untyped_storage().data_ptr() for one in tensors_in((self.args, self.kwargs))}
        return [one for one in results if one.untyped_storage().data_ptr() not in given]

    def waits(self, on_device: Sequence[bool]) -> bool:
        """Return whether the host waits; `on_device` says it of all tensors in the order of `tensors_in`."""
        if self.name in INDEXING:
            place = dict(zip(map(id, tensors_in((self.args, self.kwargs))), on_device, strict=True))
            return any(
                one.dtype in (torch.bool, torch.uint8) or (one.dim() > 0 and not place[id(one)])
                for one in tensors_in(self.args[1])
            )
        return self.name in WAITING
