"""Let LlamaIndex's objects refuse unknown settings, by `extra="forbid"`."""

from __future__ import annotations

from typing import Any


def without_class_name(values: Any) -> Any:
    """Return an object's settings without the class name that LlamaIndex adds when it serialises the object."""
    if not isinstance(values, dict):
        return values
    return {name: value for name, value in values.items() if name != "class_name"}
