"""The published methods, one file each, and the table that names them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from qcfuse_rag.errors import UnknownMethod
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.methods.agentkvshift import agentkvshift
from qcfuse_rag.methods.auto import auto
from qcfuse_rag.methods.cacheblend import cacheblend
from qcfuse_rag.methods.cachecraft import cachecraft
from qcfuse_rag.methods.epic import epic
from qcfuse_rag.methods.full import full
from qcfuse_rag.methods.fusionrag import fusionrag
from qcfuse_rag.methods.kamera import kamera
from qcfuse_rag.methods.kvcomm import kvcomm
from qcfuse_rag.methods.parameters import check_parameters
from qcfuse_rag.methods.prophetkv import prophetkv
from qcfuse_rag.methods.qcfuse import qcfuse
from qcfuse_rag.methods.random import random
from qcfuse_rag.methods.relaxkv import relaxkv
from qcfuse_rag.methods.relaycaching import relaycaching
from qcfuse_rag.methods.reuse import reuse
from qcfuse_rag.store.prefill_base import BASES, BLIND, FRAMED, unknown_base

METHODS: dict[str, Callable[..., Method]] = {
    "auto": auto,
    "full": full,
    "reuse": reuse,
    "random": random,
    "epic": epic,
    "cacheblend": cacheblend,
    "cachecraft": cachecraft,
    "fusionrag": fusionrag,
    "prophetkv": prophetkv,
    "qcfuse": qcfuse,
    "relaxkv": relaxkv,
    "agentkvshift": agentkvshift,
    "relaycaching": relaycaching,
    "kamera": kamera,
    "kvcomm": kvcomm,
}


def default_method() -> Method:
    """Return the method that is used if none is named: `auto`."""
    return auto()


def choose_method(name: str | None = None, *, ratio: float | None = None, base: str | None = None) -> Method:
    """Build the method a user names in settings or on the command line.

    Args:
        name: a key of `METHODS`; None is the default, `auto`.
        ratio: share of reused tokens to recompute; None is the method's default: the published ratio, and for `auto`
            the ratio that `qcfuse verify` recommends.
        base: a name in `BASES`; None is framed even for methods published with blind caches, because passages are
            warmed framed and primed by default. Methods that need another base keep it, as FusionRAG keeps enriched.

    Raises:
        UnknownMethod: if there is no such method or base, or the method does not take the setting.
    """
    if base is not None and (reason := unknown_base([base])):
        raise UnknownMethod(reason)
    if name is None:
        default = default_method()
        if ratio is None and base is None:
            return default
        name = default.name
    if base is None:
        published = inspect.signature(METHODS.get(name, full)).parameters.get("base")
        if published is not None and published.default in (BLIND, None):
            base = FRAMED.name
    return make_method(name, ratio=ratio, base=BASES[base] if base else None)


def make_method(name: str, **parameters: Any) -> Method:
    """Build a method by name.

    Args:
        name: a key of `METHODS`.
        **parameters: parameters of the method's function; None leaves a parameter at its default.

    Raises:
        UnknownMethod: if there is no such method, or it does not take a parameter, or a value is of the wrong type.
        ValueError: if a parameter is out of range.
    """
    if name not in METHODS:
        raise UnknownMethod(f"there is no method {name!r}; there are {', '.join(METHODS)}")
    values = {key: value for key, value in parameters.items() if value is not None}
    return METHODS[name](**check_parameters(name, METHODS[name], values))
