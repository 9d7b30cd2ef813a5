"""What is compared: methods by name, each at several ratios and over several bases."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from qcfuse_rag.errors import UnknownMethod
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.methods import METHODS, make_method
from qcfuse_rag.store.prefill_base import BASES

FULL, RANDOM = "full", "random"

RELEASE_NAMES = {"ours": "qcfuse", "fullcomp": FULL, "fuserag": "fusionrag", "fullreuse": "reuse"}
"""Names of the QCFuse release's `--baseline` that are others here."""

NAMED = re.compile(r"(?P<name>[^\[\]]+)(?:\[(?P<parameters>[^\[\]]*)\])?")

Key = tuple[str, str | None, float | None]
"""`(label, base, ratio)`: which configuration a record is of."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A method at one ratio over one base.

    Attributes:
        label: the method's name, with the parameters as the user wrote them.
        method: ready to use.
        base: name of the base it reads, or None.
        ratio: the ratio it was given or has of itself; None for methods that count tokens.
    """

    label: str
    method: Method
    base: str | None
    ratio: float | None

    @property
    def key(self) -> Key:
        """What a record of it is found by."""
        return self.label, self.base, self.ratio


def split_names(text: str) -> list[str]:
    """Split at commas that are not inside brackets."""
    return [name.strip() for name in re.split(r",(?![^\[]*\])", text) if name.strip()]


def configurations(
    names: Iterable[str], ratios: Sequence[float] = (), bases: Sequence[str] = ()
) -> list[Configuration]:
    """Cross methods with ratios and bases; full prefill, the oracle, is always first.

    Args:
        names: methods, such as `qcfuse` or with parameters `epic[n_tokens=16,ratio=none]`.
        ratios: for every method that takes one and was not given its own; none means the method's default.
        bases: names of bases for every method that takes one and was not given its own. None means the method's
            default, and for the control `random` the bases of the methods it is the control of.

    Raises:
        UnknownMethod: if there is no such method or base, or a method does not take a parameter.
        ValueError: if a parameter is out of range.
    """
    unknown = [base for base in bases if base not in BASES]
    if unknown:
        raise UnknownMethod(f"no base {unknown[0]!r}; there are {', '.join(BASES)}")
    wanted = [_parse(label) for label in (FULL, *names)]
    wanted.sort(key=lambda one: one[0] == RANDOM)  # its bases follow from the others'
    found: dict[Key, Configuration] = {}
    for name, written, given in wanted:
        label = f"{name}[{written}]" if written else name
        over: Sequence[str | None] = bases or [None]
        shares: Sequence[float | None] = ratios or [None]
        if name == RANDOM and not bases:
            others = [one for one in found.values() if method_name(one.label) != RANDOM]
            bases_of = (plain_base(one.base) for one in others if "ratio" in _takes(method_name(one.label)))
            over = [base for base in dict.fromkeys(bases_of) if base in BASES] or [None]
        for base in over if "base" in _takes(name) and "base" not in given else [None]:
            # A number of tokens a chunk is a share of its own.
            crossed = "ratio" in _takes(name) and not given.keys() & {"ratio", "n_tokens"}
            for ratio in shares if crossed else [None]:
                one = _configuration(label, name, {"ratio": ratio, **({"base": BASES[base]} if base else {}), **given})
                found.setdefault(one.key, one)
    return list(found.values())


def method_name(label: str) -> str:
    """Return a label without its parameters."""
    return label.split("[")[0]


def plain_base(base: str | None) -> str | None:
    """Return the name of a base without the way its tokens are ranked."""
    return base and base.split("+")[0]


def _configuration(label: str, name: str, parameters: dict[str, Any]) -> Configuration:
    method = make_method(name, **parameters)
    ratio = parameters.get("ratio")
    return Configuration(
        label, method, method.base.name if method.base else None, method.ratio if ratio is None else ratio
    )


def _takes(name: str) -> set[str]:
    return set(inspect.signature(METHODS[name]).parameters) if name in METHODS else set()


def _parse(label: str) -> tuple[str, str, dict[str, Any]]:
    """Return the method's own name, its parameters as they are written, and what they are."""
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
    return RELEASE_NAMES.get(name, name), written, parameters


def _value(key: str, text: str) -> Any:
    """Read a parameter: a base, `none`, `true`, `false`, a number, whole numbers as `7+8` or `7+`, or a word."""
    if key == "base" and text in BASES:
        return BASES[text]
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
