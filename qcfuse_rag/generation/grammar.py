"""Answers that a grammar allows and no others: masks over the vocabulary, from llguidance.

What a grammar allows is known for each next token before it is chosen, so an answer that must be JSON of a schema is,
whatever the model; it may still end too early for want of tokens. https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from qcfuse_rag.errors import InvalidGrammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of JSON by a JSON schema; objects have the properties it names and no others."""
    return f"start: %json {json.dumps(compact(closed(schema)))}"


def compact(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose JSON is written as `json.dumps` does: whitespace without end is what small models do."""
    separators = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
    return {**schema, "x-guidance": separators}


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects have no properties but those named, where it does not say otherwise."""
    copy: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping):
            copy[key] = {name: closed(one) if isinstance(one, Mapping) else one for name, one in value.items()}
        elif isinstance(value, Mapping):
            copy[key] = value if key in ("const", "default") else closed(value)
        elif key in ("anyOf", "oneOf", "prefixItems") and isinstance(value, (list, tuple)):
            copy[key] = [closed(one) if isinstance(one, Mapping) else one for one in value]
        else:
            copy[key] = value
    # Branches add properties to those beside them, and those of `allOf` to one another: these stay open.
    alone = not any(branches in copy for branches in ("anyOf", "oneOf", "allOf"))
    return {"additionalProperties": False, **copy} if "properties" in copy and alone else copy


class Constraint:
    """Where in its grammar an answer is.

    Args:
        vocabulary: the model's, see `LanguageModel.grammar_vocabulary`.
        grammar: in llguidance's variant of Lark.

    Raises:
        InvalidGrammar: if it is none, or is of a schema that llguidance cannot follow.
    """

    def __init__(self, vocabulary: LLTokenizer, grammar: str) -> None:
        from llguidance import LLMatcher

        self._matcher = LLMatcher(vocabulary, grammar, log_level=0)
        if self._matcher.is_error():
            raise InvalidGrammar(f"cannot answer by this grammar: {self._matcher.get_error()}")

    def mask(self, logits: Tensor) -> Tensor:
        """Return `[vocabulary]` logits with minus infinity for tokens that may not come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=len(logits)).astype(bool)
        return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), -torch.inf)

    def take(self, token: int) -> None:
        """Go on by a token that was chosen."""
        self._matcher.consume_token(token)
