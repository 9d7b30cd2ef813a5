"""What one of torch's operations does with memory: which tensors it reads and writes, and whether the host waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

WAITING = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::allclose",
    "aten::argwhere",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::isin",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
"""Whose result, or its size, the host has to know."""
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
MOVING = {"aten::copy_", "aten::_to_copy"}
"""Which take operands on two devices."""
STAGED_BYTES = 1 << 16
"""Of memory that is not page-locked, CUDA takes so much at once; the host may wait for more."""
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
            value = self.args[2] if len(self.args) > 2 else None
            filling = isinstance(value, Tensor) and value.dim() == 0 and True not in self.args[3:]
            place = dict(zip(map(id, tensors_in((self.args, self.kwargs))), on_device, strict=True))
            return any(
                (one.dtype in (torch.bool, torch.uint8) and not filling) or (one.dim() > 0 and not place[id(one)])
                for one in tensors_in(self.args[1])
            )
        return self.name in WAITING or (self.name == "aten::where" and len(self.args) == 1)

    def host_operands(self, on_device: Sequence[bool]) -> list[Tensor]:
        """Return the operands on the host, but for numbers and indices, which may be there."""
        indices = tensors_in(self.args[1]) if self.name in INDEXING else []
        operands = zip(tensors_in((self.args, self.kwargs)), on_device, strict=True)
        return [one for one, on in operands if not on and one.dim() > 0 and all(one is not index for index in indices)]

    @property
    def non_blocking(self) -> bool:
        return bool(self.kwargs.get("non_blocking")) or (self.name == "aten::copy_" and True in self.args[2:])

    def waits_for_copy(self, from_host: Sequence[Tensor], is_pinned: Callable[[Tensor], bool]) -> bool:
        """Return whether the host waits until something of it is copied to the device."""
        if self.name not in MOVING or not any(one.numel() for one in from_host):
            return False
        return not self.non_blocking or any(one.nbytes > STAGED_BYTES and not is_pinned(one) for one in from_host)
