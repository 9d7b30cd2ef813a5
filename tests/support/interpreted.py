"""Triton's interpreter, quicker: it prepares the language for every launch, and types for every operation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock


class _Kept:
    """Stands for the replacements of one launch, which are kept."""

    def restore(self) -> None:
        pass


@contextmanager
def quickly() -> Iterator[None]:
    """Interpret kernels so. What they compute is the same."""
    from triton.language import core
    from triton.runtime import interpreter

    prepare, prepared = interpreter._patch_lang, dict[frozenset[int], Any]()
    numpy_type, numpy_types = interpreter._get_np_dtype, dict[str, Any]()

    def prepare_once(fn: Callable[..., Any]) -> _Kept:
        modules = frozenset(id(value) for value in fn.__globals__.values() if isinstance(value, ModuleType))
        if modules not in prepared:
            prepared[modules] = prepare(fn)
        return _Kept()

    def numpy_type_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(kind)
        return numpy_types[name]

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(interpreter, "_patch_lang", prepare_once))
        stack.enter_context(mock.patch.object(interpreter, "_get_np_dtype", numpy_type_of))
        stack.enter_context(_made_once(core.block_type, _block))
        stack.enter_context(_made_once(core.tensor, _tensor, "handle"))
        try:
            yield
        finally:
            for scope in reversed(prepared.values()):
                scope.restore()


def _block(element: Any, shape: Any) -> Hashable:
    return element.name, *(getattr(size, "value", size) for size in shape)


def _tensor(handle: object, kind: Any) -> Hashable:
    return kind.__class__, kind.name


@contextmanager
def _made_once(kind: Any, key: Callable[..., Hashable], *own: str) -> Iterator[None]:
    """Have objects of a class take their attributes from an earlier one of the same key, except for their own."""
    make, made = kind.__init__, dict[Hashable, dict[str, Any]]()

    def quick(self: Any, first: Any, second: Any) -> None:
        same = key(first, second)
        if same not in made:
            make(self, first, second)
            made[same] = {name: value for name, value in self.__dict__.items() if name not in own}
            return
        self.__dict__.update(made[same])
        if own:
            setattr(self, *own, first)

    with mock.patch.object(kind, "__init__", quick):
        yield
