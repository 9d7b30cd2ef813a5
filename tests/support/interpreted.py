"""Triton's interpreter, quicker: it changes the language for every function that a kernel calls, and once will do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock


@contextmanager
def quickly() -> Iterator[None]:
    """Interpret kernels so. What they compute is the same."""
    from triton.runtime import interpreter

    launch, prepare = interpreter.GridExecutor.__call__, interpreter._patch_lang
    prepared: list[set[frozenset[int]]] = []

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        prepared.append(set())
        try:
            launch(self, *args, **kwargs)
        finally:
            prepared.pop()

    def prepare_once(fn: Callable[..., Any]) -> Any:
        modules = frozenset(id(one) for one in fn.__globals__.values() if isinstance(one, ModuleType))
        if prepared and modules in prepared[-1]:
            return None  # it is a function that a kernel calls, which does nothing with what it is given
        if prepared:
            prepared[-1].add(modules)
        return prepare(fn)

    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", launched),
        mock.patch.object(interpreter, "_patch_lang", prepare_once),
    ):
        yield
