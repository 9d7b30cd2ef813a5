"""Settings of LlamaIndex's objects: those that do not exist are refused, by `extra="forbid"`."""

from __future__ import annotations

from typing import Any


def without_class_name(given: Any) -> Any:
    """Return what an object is made of without the name that LlamaIndex adds when it writes one down."""
    if not isinstance(given, dict):
        return given
    return {name: value for name, value in given.items() if name != "class_name"}
