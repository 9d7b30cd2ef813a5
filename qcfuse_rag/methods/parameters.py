"""Check the parameters of a method against their types, since they come from command lines and settings too."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from qcfuse_rag.errors import UnknownMethod

NUMBERS = {float: "a finite number", int: "a whole number", bool: "true or false"}


def checked(name: str, function: Callable[..., object], given: dict[str, Any]) -> dict[str, Any]:
    """Return a method's parameters, a whole number alone as a tuple where one is wanted.

    Args:
        name: of the method.
        function: that makes it, its parameters annotated.
        given: values by parameter.

    Raises:
        UnknownMethod: if the method does not take a parameter, or a value is not of its type.
    """
    accepted = inspect.signature(function).parameters
    wrong = [key for key in given if key not in accepted]
    if wrong:
        takes = ", ".join(accepted) or "no parameters"
        raise UnknownMethod(f"method {name!r} does not take {', '.join(wrong)}; it takes {takes}")
    hints = get_type_hints(function)
    found = {}
    for key, value in given.items():
        if type(value) is int and not _fits(value, hints[key]) and _fits((value,), hints[key]):
            value = (value,)
        if not _fits(value, hints[key]):
            raise UnknownMethod(f"{key} of method {name!r} must be {_words(hints[key])}, got {value!r}")
        found[key] = value
    return found


def _fits(value: object, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in args)
    if origin is Literal:
        return value in args
    if origin is tuple:  # of any length, all of one type
        return isinstance(value, tuple) and all(_fits(one, args[0]) for one in value)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    if hint in (int, bool):
        return type(value) is hint
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_words(one) for one in args if one is not NoneType)
    if origin is Literal:
        return " or ".join(map(str, args))
    if origin is tuple:
        return "whole numbers such as 7+8"
    return NUMBERS.get(hint, f"a {hint.__name__}")
