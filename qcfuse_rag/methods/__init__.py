"""The published methods, one file or folder each, and the tables that name them and those of other packages.

The core imports these tables and never a method. A method is imported when it is asked for by its name, so `auto`
imports no other method. Another package adds a method by an entry point of the group `qcfuse_rag.methods`, and a base
of its own by one of the group `qcfuse_rag.bases`; see CONTRIBUTING.md.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from qcfuse_rag.errors import UnknownMethod
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.store.key import BASES as CORE_BASES
from qcfuse_rag.store.key import BLIND, FRAMED, Base

T = TypeVar("T")
NUMBERS = {float: "a finite number", int: "a whole number", bool: "true or false"}


class Table(Mapping[str, T], Generic[T]):
    """Objects by name, each imported when it is asked for: ours, then those that installed packages register.

    Args:
        group: group of the entry points.
        kind: what an entry is, for errors.
        ours: `module:name` in this package by the name in the table. No entry point replaces one of them.
    """

    def __init__(self, group: str, kind: str, ours: Mapping[str, str]) -> None:
        self._group, self._kind, self._ours = group, kind, ours

    def __getitem__(self, name: str) -> T:
        """Return an entry.

        Raises:
            KeyError: if there is none.
            UnknownMethod: if a package registers it, and it cannot be imported.
        """
        if name in self._ours:
            module, _, attribute = self._ours[name].partition(":")
            found: T = getattr(import_module(f"{__name__}.{module}"), attribute)
            return found
        point = self._registered()[name]
        try:
            found = point.load()
        except Exception as error:
            raise UnknownMethod(
                f"the {self._kind} {name!r} of package {_package(point)} cannot be imported "
                f"({type(error).__name__}: {error}); update the package or uninstall it"
            ) from error
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._ours or name in self._registered()

    def __iter__(self) -> Iterator[str]:
        return iter({**self._ours, **self._registered()})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _registered(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self._group)}


METHODS: Mapping[str, Callable[..., Method]] = Table(
    "qcfuse_rag.methods",
    "method",
    {
        "auto": "auto:auto",
        "full": "full:full",
        "reuse": "reuse:reuse",
        "random": "random:random",
        "epic": "epic:epic",
        "cacheblend": "cacheblend:cacheblend",
        "cachecraft": "cachecraft:cachecraft",
        "fusionrag": "fusionrag:fusionrag",
        "prophetkv": "prophetkv:prophetkv",
        "qcfuse": "qcfuse:qcfuse",
        "relaxkv": "relaxkv:relaxkv",
        "agentkvshift": "agentkvshift:agentkvshift",
        "relaycaching": "relaycaching:relaycaching",
        "kamera": "kamera:kamera",
        "kvcomm": "kvcomm:kvcomm",
    },
)
"""The functions that build methods, by name."""

DEFAULT_METHOD = "auto"
"""The method that is used if none is named."""

METHOD_BASES: Mapping[str, Base] = Table(
    "qcfuse_rag.bases", "base", {"begun": "epic:BEGUN", "enriched": "fusionrag:ENRICHED"}
)
"""The bases that methods add to those of the core."""

RANKINGS: Mapping[str, Callable[[Base], Base]] = Table(
    "qcfuse_rag.rankings",
    "ranking",
    {"kvzip": "rankings:kvzip", "knorm": "rankings:knorm", "sinks": "rankings:sinks"},
)
"""Functions that return a base with another ranking of tokens, which is named `base+ranking`."""


def find_base(name: str) -> Base:
    """Return the base of a name, such as `framed`, or `blind+kvzip` for another ranking of tokens.

    Raises:
        UnknownMethod: if there is none.
    """
    plain, _, ranking = name.partition("+")
    reason = unknown_base([plain])
    if reason is None and ranking and ranking not in RANKINGS:
        reason = f"there is no ranking {ranking!r}; there are {', '.join(RANKINGS)}"
    if reason is not None:
        raise UnknownMethod(reason)
    base = CORE_BASES[plain] if plain in CORE_BASES else METHOD_BASES[plain]
    return RANKINGS[ranking](base) if ranking else base


def unknown_base(names: Iterable[str]) -> str | None:
    """Return what is wrong with the first of some names that is no base's; None if all are bases."""
    unknown = next((name for name in names if name not in CORE_BASES and name not in METHOD_BASES), None)
    return None if unknown is None else f"there is no base {unknown!r}; there are {', '.join(all_bases())}"


def all_bases() -> list[str]:
    """Return the names of all bases, those of methods last."""
    return [*CORE_BASES, *METHOD_BASES]


def choose_method(name: str | None = None, *, ratio: float | None = None, base: str | None = None) -> Method:
    """Build the method a user names in settings or on the command line.

    Args:
        name: a key of `METHODS`; None is `DEFAULT_METHOD`.
        ratio: share of reused tokens to recompute; None is the method's default: the published ratio, and for `auto`
            the ratio that `qcfuse verify` recommends.
        base: name of a base; None is framed even for methods published with blind caches, because passages are
            warmed framed and primed by default. Methods that need another base keep it, as FusionRAG keeps enriched.

    Raises:
        UnknownMethod: if there is no such method or base, or the method does not take the setting.
    """
    name, chosen = name or DEFAULT_METHOD, None if base is None else find_base(base)
    if chosen is None and name in METHODS:
        published = inspect.signature(METHODS[name]).parameters.get("base")
        if published is not None and published.default in (BLIND, None):
            chosen = FRAMED
    return make_method(name, ratio=ratio, base=chosen)


def make_method(name: str, **parameters: Any) -> Method:
    """Build a method by name.

    Args:
        name: a key of `METHODS`.
        **parameters: parameters of the method's function; None leaves a parameter at its default.

    Raises:
        UnknownMethod: if there is no such method, its package cannot be imported, the method does not take a parameter,
            or a value is of the wrong type.
        ValueError: if a parameter is out of range.
    """
    if name not in METHODS:
        raise UnknownMethod(f"there is no method {name!r}; there are {', '.join(METHODS)}")
    function = METHODS[name]
    values = {key: value for key, value in parameters.items() if value is not None}
    method = function(**check_parameters(name, function, values))
    if not isinstance(method, Method):
        raise UnknownMethod(f"the function of method {name!r} in {function.__module__} returns no Method; update it")
    return method


def check_parameters(name: str, function: Callable[..., object], values: dict[str, Any]) -> dict[str, Any]:
    """Return a method's parameters, with a single whole number as a tuple where the type is a tuple.

    They also come from command lines and settings.

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


def _package(point: EntryPoint) -> str:
    return point.value if point.dist is None else f"{point.dist.name} {point.dist.version}"
