"""What a chunk says of its birth: behind which other chunks it was prefilled, and what was measured then."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

MAX_CONTEXT = 1024
"""Most chunks a context may name, and most numbers one fact may have."""

MAX_FACTS = 16
EXTRAS = ("inter",)
"""Blocks a chunk may have besides keys, values and ranking, each `[n_tokens, 1]` float32, in the order they are stored.

`inter`: attention each token paid to the chunks before it, in heads' mean share of the whole, mean over layers.
"""

HASH = re.compile(r"[0-9a-f]{32}")
NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")

Context = tuple[str, ...]
Facts = Mapping[str, tuple[float, ...]]


def check_provenance(context: Context | None, facts: Facts, extras: Sequence[str]) -> None:
    """Check that this is what a chunk may say of its birth.

    Args:
        context: `store.key.hash_ids` of each chunk before it, at most 1,024; None for what its base says.
        facts: at most 16, each of at most 1,024 finite numbers under a short name.
        extras: names of the additional blocks.

    Raises:
        ValueError: with what cannot be.
    """
    if context is not None and not (
        len(context) <= MAX_CONTEXT and all(type(one) is str and HASH.fullmatch(one) for one in context)
    ):
        raise ValueError(f"context cannot be: give `hash_ids` of at most {MAX_CONTEXT:,} chunks")
    if len(facts) > MAX_FACTS or not all(type(name) is str and NAME.fullmatch(name) for name in facts):
        raise ValueError(f"facts cannot be: give at most {MAX_FACTS}, with names of small letters")
    for name, numbers in facts.items():
        if len(numbers) > MAX_CONTEXT or not all(type(one) in (int, float) and math.isfinite(one) for one in numbers):
            raise ValueError(f"fact {name} cannot be: give at most {MAX_CONTEXT:,} finite numbers")
    if list(extras) != [name for name in EXTRAS if name in extras]:
        raise ValueError(f"blocks cannot be: besides keys and values there are {', '.join(EXTRAS)}")


def provenance_fields(context: Context | None, facts: Facts, extras: Sequence[str]) -> dict[str, Any]:
    """Return the header's fields about a birth as plain data for JSON; what is not said has no field."""
    fields: dict[str, Any] = {}
    if context is not None:
        fields["context"] = list(context)
    if facts:
        fields["facts"] = {name: list(numbers) for name, numbers in facts.items()}
    if extras:
        fields["extras"] = list(extras)
    return fields


def parse_provenance(about: Mapping[str, Any]) -> tuple[Context | None, Facts, tuple[str, ...]]:
    """Return context, facts and extras of a header, checked.

    Raises:
        ValueError, TypeError, AttributeError, OverflowError: if a field cannot be.
    """
    context, facts, extras = about.get("context", ()), about.get("facts", {}), about.get("extras", ())
    given = {name: about[name] for name in ("context", "facts", "extras") if name in about}
    lists = [given[name] for name in ("context", "extras") if name in given]
    if not all(type(one) is list for one in lists) or not all(type(one) is list for one in facts.values()):
        raise ValueError("context, facts and extras are lists")
    check_provenance(tuple(context), facts, extras)
    floats = {name: tuple(float(one) for one in numbers) for name, numbers in facts.items()}
    return (tuple(context) if "context" in given else None), floats, tuple(extras)
