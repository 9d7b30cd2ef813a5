"""The configurations to compare: methods by name, at several ratios and over several bases."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from qcfuse_rag.errors import UnknownMethod
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.methods import METHODS, all_bases, find_base, make_method, unknown_base

FULL, RANDOM = "full", "random"

NAMED = re.compile(r"(?P<name>[^\[\]]+)(?:\[(?P<parameters>[^\[\]]*)\])?")

Key = tuple[str, str | None, float | None]  # `(label, base, ratio)` of a configuration


@dataclass(frozen=True, slots=True)
class Configuration:
    """A method at one ratio over one base, by their names; the label has the parameters as the user wrote them.

    `ratio` is the requested ratio or the method's own; None for methods that count tokens.
    """

    label: str
    method: Method
    base: str | None
    ratio: float | None

    @property
    def key(self) -> Key:
        """The key of its records."""
        return self.label, self.base, self.ratio


NO_PASSAGES = Configuration("no passages", make_method("full"), None, None)
"""Full prefill of the question without any passage: what the model knows by itself."""


def split_names(text: str) -> list[str]:
    """Split a text at the commas outside brackets."""
    return [name.strip() for name in re.split(r",(?![^\[]*\])", text) if name.strip()]


def configurations(
    names: Iterable[str], ratios: Sequence[float] = (), bases: Sequence[str] = ()
) -> list[Configuration]:
    """Cross methods with ratios and bases; full prefill, the reference, is always first.

    Names are methods, such as `qcfuse`, or with parameters `epic[n_tokens=16,ratio=none]`. Ratios and bases are for
    every method that takes them and names none; without any, the method's default counts, and for the control `random`
    the bases of the methods that it controls.
    """
    if reason := unknown_base(bases):
        raise UnknownMethod(reason)
    parsed = [_parse(label) for label in (FULL, *names)]
    parsed.sort(key=lambda method: method[0] == RANDOM)  # its bases follow from those of the other methods
    chosen: dict[Key, Configuration] = {}
    for name, written, parameters in parsed:
        label = f"{name}[{written}]" if written else name
        method_bases: Sequence[str | None] = bases or [None]
        shares: Sequence[float | None] = ratios or [None]
        if name == RANDOM and not bases:
            others = [other for other in chosen.values() if method_name(other.label) != RANDOM]
            controlled = (plain_base(other.base) for other in others if "ratio" in _takes(method_name(other.label)))
            method_bases = [base for base in dict.fromkeys(controlled) if base in all_bases()] or [None]
        for base in method_bases if "base" in _takes(name) and "base" not in parameters else [None]:
            # A method with a number of tokens for each chunk takes no ratio.
            crossed = "ratio" in _takes(name) and not parameters.keys() & {"ratio", "n_tokens"}
            for ratio in shares if crossed else [None]:
                settings = {"ratio": ratio, **({"base": find_base(base)} if base else {}), **parameters}
                method = make_method(name, **settings)
                stated = method.ratio if settings["ratio"] is None else settings["ratio"]
                configuration = Configuration(label, method, method.base.name if method.base else None, stated)
                chosen.setdefault(configuration.key, configuration)
    return list(chosen.values())


def method_name(label: str) -> str:
    """Return a label without its parameters."""
    return label.split("[")[0]


def plain_base(base: str | None) -> str | None:
    """Return the name of a base without the ranking of its tokens."""
    return base and base.split("+")[0]


def _takes(name: str) -> set[str]:
    return set(inspect.signature(METHODS[name]).parameters) if name in METHODS else set()


def _parse(label: str) -> tuple[str, str, dict[str, Any]]:
    match = NAMED.fullmatch(label)
    if match is None:
        raise UnknownMethod(f"cannot read {label!r}; write a method as name or name[parameter=value,...]")
    parameters = {}
    name, written = match["name"].strip(), (match["parameters"] or "").strip()
    for part in filter(None, written.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise UnknownMethod(f"cannot read {part!r} in {label!r}; write name[parameter=value,...]")
        parameters[key.strip()] = _value(key.strip(), value.strip())
    return name, written, parameters


def _value(key: str, text: str) -> Any:
    """Read a parameter: a base, `none`, `true`, `false`, a number, whole numbers such as `7+8` or `7+`, or a word."""
    if key == "base" and text in all_bases():
        return find_base(text)
    words: dict[str, Any] = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    parts = text.removesuffix("+").split("+")
    if "+" in text and all(part.isdigit() for part in parts):
        return tuple(int(part) for part in parts)
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
