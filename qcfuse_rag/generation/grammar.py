"""Constrain answers to a grammar by masks over the vocabulary, with llguidance.

The grammar says before each token which tokens may come next, so an answer with a JSON schema follows that schema,
whatever the model. It may still be cut off by the token limit. https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from qcfuse_rag.errors import InvalidGrammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of JSON that follows a schema; objects have only the properties that the schema names."""
    return f"start: %json {json.dumps(with_compact_json(close_objects(schema)))}"


def with_compact_json(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose JSON has the spacing of `json.dumps`; small models write whitespace without end."""
    separators = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
    return {**schema, "x-guidance": separators}


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects allow no unnamed properties, unless the schema says otherwise."""

    def close(value: Any) -> Any:
        return close_objects(value) if isinstance(value, Mapping) else value

    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping):
            closed[key] = {name: close(subschema) for name, subschema in value.items()}
        elif key in ("anyOf", "oneOf", "prefixItems") and isinstance(value, (list, tuple)):
            closed[key] = [close(subschema) for subschema in value]
        else:
            closed[key] = value if key in ("const", "default") else close(value)
    # Branches add properties to those beside them, and the parts of `allOf` add to each other: these stay open.
    has_branches = any(branches in closed for branches in ("anyOf", "oneOf", "allOf"))
    return {"additionalProperties": False, **closed} if "properties" in closed and not has_branches else closed


class Constraint:
    """The state of one answer in its grammar.

    Args:
        vocabulary: of the model, see `LanguageModel.grammar_vocabulary`.
        grammar: in llguidance's variant of Lark.

    Raises:
        InvalidGrammar: if the grammar is invalid, or its schema has a feature that llguidance does not support.
    """

    def __init__(self, vocabulary: LLTokenizer, grammar: str) -> None:
        from llguidance import LLMatcher

        self._consumed = 0
        self._matcher = LLMatcher(vocabulary, grammar, log_level=0)
        if self._matcher.is_error():
            raise InvalidGrammar(f"cannot answer by this grammar: {self._matcher.get_error()}")

    def mask(self, logits: Tensor) -> Tensor:
        """Return `[vocabulary]` logits with minus infinity for tokens that may not come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=len(logits)).astype(bool)
        return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), -torch.inf)

    def consume(self, token: int) -> None:
        """Advance by the chosen token."""
        self._matcher.consume_token(token)
        self._consumed += 1

    def mask_after(self, answer: Sequence[int], logits: Tensor) -> Tensor:
        """Return the logits after an answer as `mask` does; the answer goes on from that of the call before."""
        for token in answer[self._consumed :]:
            self.consume(token)
        return self.mask(logits)
