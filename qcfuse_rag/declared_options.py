"""Read what a settings dataclass declares, so that every surface shows the same options.

A settings dataclass declares an option once: a field with its type and default, limits in the type's annotation
(`Annotated[float, Ge(0)]`), and its text under `Attributes:` in the docstring. The command line, the fields of the
frameworks' classes and those of the server's requests are made from that.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import re
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

LIMITS = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "more than"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "less than"),
}
"""The limits that `annotated_types` has classes for (Ge, Gt, Le, Lt)."""


class DeclaredOption(NamedTuple):
    """One option of a settings dataclass.

    Attributes:
        type: of its values, without limits.
        default: the value if none is given; `dataclasses.MISSING` if one has to be given.
        text: what the option does, as users read it.
        limits: the limits of a number, by the names in `LIMITS`.
    """

    type: Any
    default: Any
    text: str
    limits: dict[str, Any]


@cache
def declared_options(settings: type) -> dict[str, DeclaredOption]:
    """Return the options of a settings dataclass by name; an option may have no text."""
    hints, texts = get_type_hints(settings, include_extras=True), _attribute_texts(settings)
    options = {}
    for field in dataclasses.fields(settings):
        kind, *metadata = (
            get_args(hints[field.name]) if get_origin(hints[field.name]) is Annotated else (hints[field.name],)
        )
        limits = {name: getattr(limit, name) for limit in metadata for name in LIMITS if hasattr(limit, name)}
        options[field.name] = DeclaredOption(kind, field.default, texts.get(field.name, ""), limits)
    return options


def check_limits(settings: object) -> None:
    """Check the numbers of a settings object against the limits that its class declares.

    Raises:
        ValueError: if a number is outside of its limits.
    """
    for name, option in declared_options(type(settings)).items():  # type: ignore[arg-type]  # classes are hashable
        value = getattr(settings, name)
        if value is not None and not all(LIMITS[limit][0](value, bound) for limit, bound in option.limits.items()):
            wanted = " and ".join(f"{LIMITS[limit][1]} {bound:g}" for limit, bound in option.limits.items())
            raise ValueError(f"{name} must be {wanted}, got {value}")


def _attribute_texts(settings: type) -> dict[str, str]:
    """Return the texts under `Attributes:` in the docstrings of a class and its bases, by name."""
    texts: dict[str, str] = {}
    for base in reversed(settings.__mro__):
        _, _, attributes = inspect.cleandoc(base.__doc__ or "").partition("\nAttributes:\n")
        section = re.split(r"\n(?=\S)", attributes)[0]
        entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, flags=re.MULTILINE)
        texts |= {name: " ".join(text.split()) for name, text in entries}
    return texts


def pydantic_fields(settings: type, names: Iterable[str], *, optional: bool = False) -> dict[str, Any]:
    """Return fields for `pydantic.create_model`: options of a settings dataclass, with their limits and texts.

    Args:
        settings: the dataclass.
        names: of the options.
        optional: whether each may be None, which is the default then and leaves the choice to others.
    """
    from pydantic import Field

    fields = {}
    for name in names:
        option = declared_options(settings)[name]
        kind, default = (option.type | None, None) if optional else (option.type, option.default)
        fields[name] = (kind, Field(default=default, description=option.text, **option.limits))
    return fields
