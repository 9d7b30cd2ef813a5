"""Find the tensors that a torch operation reads and writes, and whether the host waits for it."""

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
"""Operations for which the host waits: it needs their result or its size."""
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
MOVING = {"aten::copy_", "aten::_to_copy"}
"""Operations that accept operands on two devices."""
STAGED_BYTES = 1 << 16
"""Bytes that CUDA copies from pageable memory without waiting; for more the host may wait."""
CONVERTING = {"aten::to", "aten::cpu", "aten::cuda", "aten::type_as"}
FILLING = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_"}
"""Operations that do not read the tensors they write."""


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


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
        if self.name == "aten::histc" and not args[0].is_floating_point():  # only CUDA supports integers
            return self.func(args[0].float(), *args[1:], **self.kwargs).to(args[0].dtype)
        return self.func(*args, **self.kwargs)

    def written(self) -> list[Tensor]:
        """Return the existing tensors that it writes."""
        written: list[Tensor] = []
        if self.func._schema.is_mutable:
            for index, argument in enumerate(self.func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    keyword = self.kwargs.get(argument.name)
                    written += tensors_in(self.args[index] if index < len(self.args) else keyword)
        return written

    def reads(self) -> list[Tensor]:
        """Return the tensors that it reads."""
        if "empty" in self.name or self.name.endswith("_like") or "::new_" in self.name:
            return []
        skipped = {id(tensor) for tensor in self.written()} if self.name in FILLING else set()
        return [tensor for tensor in tensors_in((self.args, self.kwargs)) if id(tensor) not in skipped]

    def fresh(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Return the results in new memory."""
        existing = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((self.args, self.kwargs))}
        return [tensor for tensor in results if tensor.untyped_storage().data_ptr() not in existing]

    def waits(self, on_device: Sequence[bool]) -> bool:
        """Return whether the host waits; `on_device` has an item for each tensor, in the order of `tensors_in`."""
        if self.name in INDEXING:
            value = self.args[2] if len(self.args) > 2 else None
            filling = isinstance(value, Tensor) and value.dim() == 0 and True not in self.args[3:]
            is_on_device = dict(zip(map(id, tensors_in((self.args, self.kwargs))), on_device, strict=True))
            return any(
                (index.dtype in (torch.bool, torch.uint8) and not filling)
                or (index.dim() > 0 and not is_on_device[id(index)])
                for index in tensors_in(self.args[1])
            )
        return self.name in WAITING or (self.name == "aten::where" and len(self.args) == 1)

    def host_operands(self, on_device: Sequence[bool]) -> list[Tensor]:
        """Return the operands on the host except scalars and indices, which are allowed there."""
        indices = tensors_in(self.args[1]) if self.name in INDEXING else []
        operands = zip(tensors_in((self.args, self.kwargs)), on_device, strict=True)
        on_host = [tensor for tensor, on in operands if not on and tensor.dim() > 0]
        return [tensor for tensor in on_host if all(tensor is not index for index in indices)]

    @property
    def non_blocking(self) -> bool:
        return bool(self.kwargs.get("non_blocking")) or (self.name == "aten::copy_" and True in self.args[2:])

    def waits_for_copy(self, from_host: Sequence[Tensor], is_pinned: Callable[[Tensor], bool]) -> bool:
        """Return whether the host waits for a copy to the device."""
        if self.name not in MOVING or not any(tensor.numel() for tensor in from_host):
            return False
        return not self.non_blocking or any(
            tensor.nbytes > STAGED_BYTES and not is_pinned(tensor) for tensor in from_host
        )
