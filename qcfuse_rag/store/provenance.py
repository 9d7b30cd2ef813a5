"""Provenance of a chunk: the chunks it was prefilled behind, and what was measured then."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

MAX_CONTEXT = 1024
"""Most chunks of a context, and most numbers of one fact."""

MAX_FACTS = 16
EXTRAS = ("inter",)
"""Blocks a chunk may have besides keys, values and ranking, each `[n_tokens, 1]` float32, in the order they are stored.

`inter`: attention each token paid to the chunks before it, as heads' mean share of the whole, mean over layers.
"""

HASH = re.compile(r"[0-9a-f]{32}")
NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")

Context = tuple[str, ...]
Facts = Mapping[str, tuple[float, ...]]


def check_provenance(context: Context | None, facts: Facts, extras: Sequence[str]) -> None:
    """Check a chunk's provenance.

    Args:
        context: `store.key.hash_ids` of each chunk before it, at most 1,024; None if its base says what was before it.
        facts: at most 16, each of at most 1,024 finite numbers, by short names.
        extras: names of the additional blocks.

    Raises:
        ValueError: with what is wrong.
    """
    if context is not None and not (
        len(context) <= MAX_CONTEXT and all(type(name) is str and HASH.fullmatch(name) for name in context)
    ):
        raise ValueError(f"invalid context: give `hash_ids` of at most {MAX_CONTEXT:,} chunks")
    if len(facts) > MAX_FACTS or not all(type(name) is str and NAME.fullmatch(name) for name in facts):
        raise ValueError(f"invalid facts: give at most {MAX_FACTS}, with names of small letters")
    for name, numbers in facts.items():
        if len(numbers) > MAX_CONTEXT or not all(type(x) in (int, float) and math.isfinite(x) for x in numbers):
            raise ValueError(f"invalid fact {name}: give at most {MAX_CONTEXT:,} finite numbers")
    if list(extras) != [name for name in EXTRAS if name in extras]:
        raise ValueError(f"invalid blocks: besides keys and values there are {', '.join(EXTRAS)}")


def provenance_fields(context: Context | None, facts: Facts, extras: Sequence[str]) -> dict[str, Any]:
    """Return the provenance as header fields, ready for JSON; an empty part has no field."""
    fields: dict[str, Any] = {}
    if context is not None:
        fields["context"] = list(context)
    if facts:
        fields["facts"] = {name: list(numbers) for name, numbers in facts.items()}
    if extras:
        fields["extras"] = list(extras)
    return fields


def parse_provenance(header: Mapping[str, Any]) -> tuple[Context | None, Facts, tuple[str, ...]]:
    """Return context, facts and extras of a header's JSON, checked.

    Raises:
        ValueError, TypeError, AttributeError, OverflowError: if a field is invalid.
    """
    context, facts, extras = header.get("context", ()), header.get("facts", {}), header.get("extras", ())
    lists = [header[name] for name in ("context", "extras") if name in header]
    if not all(type(items) is list for items in (*lists, *facts.values())):
        raise ValueError("context, facts and extras are lists")
    check_provenance(tuple(context), facts, extras)
    floats = {name: tuple(float(number) for number in numbers) for name, numbers in facts.items()}
    return (tuple(context) if "context" in header else None), floats, tuple(extras)
