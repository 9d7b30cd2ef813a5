"""Type checks of method parameters, which also come from command lines and settings."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from qcfuse_rag.errors import UnknownMethod

NUMBERS = {float: "a finite number", int: "a whole number", bool: "true or false"}


def check_parameters(name: str, function: Callable[..., object], values: dict[str, Any]) -> dict[str, Any]:
    """Return a method's parameters, with a single whole number as a tuple where the type is a tuple.

    Args:
        name: the method's name.
        function: the method's function, with annotated parameters.
        values: values by parameter.

    Raises:
        UnknownMethod: if the method does not take a parameter, or a value is not of its type.
    """
    accepted = inspect.signature(function).parameters
    unknown = [key for key in values if key not in accepted]
    if unknown:
        takes = ", ".join(accepted) or "no parameters"
        raise UnknownMethod(f"method {name!r} does not take {', '.join(unknown)}; it takes {takes}")
    hints = get_type_hints(function)
    checked = {}
    for key, value in values.items():
        if type(value) is int and not _fits(value, hints[key]) and _fits((value,), hints[key]):
            value = (value,)
        if not _fits(value, hints[key]):
            raise UnknownMethod(f"{key} of method {name!r} must be {_describe(hints[key])}, got {value!r}")
        checked[key] = value
    return checked


def _fits(value: object, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, option) for option in args)
    if origin is Literal:
        return value in args
    if origin is tuple:  # tuple[X, ...]
        return isinstance(value, tuple) and all(_fits(item, args[0]) for item in value)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    if hint in (int, bool):
        return type(value) is hint
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_describe(option) for option in args if option is not NoneType)
    if origin is Literal:
        return " or ".join(map(str, args))
    if origin is tuple:
        return "whole numbers such as 7+8"
    return NUMBERS.get(hint, f"a {hint.__name__}")
