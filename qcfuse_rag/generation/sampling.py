"""Choose the next token from logits, and constrain answers to a grammar by masks over the vocabulary, with llguidance.

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
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from qcfuse_rag.errors import InvalidGrammar, InvalidSetting
from qcfuse_rag.generation.sampling_params import SamplingParams
from qcfuse_rag.runtime.language_model import LanguageModel

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def json_grammar(schema: Mapping[str, Any], rule: str = "start") -> str:
    """Return the grammar of JSON that follows a schema; objects have only the properties that the schema names.

    The spacing is that of `json.dumps`: small models write whitespace without end.
    """
    spacing = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
    return f"{rule}: %json {json.dumps({**close_objects(schema), 'x-guidance': spacing})}"


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
    """The state of one answer in its grammar, in llguidance's variant of Lark.

    Raises:
        InvalidGrammar: if the grammar is invalid, or its schema has a feature that llguidance does not support.
    """

    def __init__(self, vocabulary: LLTokenizer, grammar: str) -> None:
        from llguidance import LLMatcher

        self._consumed = 0
        self._matcher = LLMatcher(vocabulary, grammar, log_level=0)
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]  # the grammar follows
            raise InvalidGrammar(f"cannot answer by this grammar: {reason}")

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


MIN_TEMPERATURE = 0.01
"""Lower temperatures, except 0, overflow; they are raised to it."""


class Sampler:
    """Samples the tokens of one answer; holds the state of random numbers and grammar.

    Raises:
        InvalidGrammar: if the grammar cannot be followed.
        QCFuseError: if there is a grammar and llguidance is not installed.
        InvalidSetting: if `logit_bias` names an id outside of the vocabulary.
    """

    def __init__(self, params: SamplingParams, lm: LanguageModel) -> None:
        self._params = params
        self._repetition = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))
        self._bias_ids = torch.tensor([token for token, _ in params.logit_bias], dtype=torch.int64, device=lm.device)
        self._biases = torch.tensor([bias for _, bias in params.logit_bias], device=lm.device)
        vocabulary = lm.model.get_input_embeddings().num_embeddings
        if unknown := [token for token, _ in params.logit_bias if not 0 <= token < vocabulary]:
            message = f"logit_bias names token {unknown[0]}, and the model's tokens end at {vocabulary - 1}"
            raise InvalidSetting(message, "logit_bias")
        self._greedy = params.temperature == 0
        self._constraint = None if params.grammar is None else Constraint(lm.grammar_vocabulary, params.grammar)
        self._generator = torch.Generator(device=lm.device)
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
        self._warpers = LogitsProcessorList()
        if not self._greedy:
            self._warpers.append(TemperatureLogitsWarper(max(float(params.temperature), MIN_TEMPERATURE)))
            if params.top_k:
                self._warpers.append(TopKLogitsWarper(params.top_k))
            if params.top_p < 1:
                self._warpers.append(TopPLogitsWarper(params.top_p))
            if params.min_p:
                self._warpers.append(MinPLogitsWarper(params.min_p))

    def __call__(self, logits: Tensor, prompt: Sequence[int] = (), answer: Sequence[int] = ()) -> int:
        """Choose a token from `[vocabulary]` float32 logits; penalties need the ids of prompt and answer so far."""
        if self._params.adjusts_logits:
            logits = self._adjust(logits, prompt, answer)
        if self._constraint is None:
            return self._choose(logits)
        token = self._choose(self._constraint.mask(logits))
        self._constraint.consume(token)
        return token

    def _adjust(self, logits: Tensor, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        params = self._params
        answer_ids = torch.tensor(answer, dtype=torch.int64, device=logits.device)
        if params.repetition_penalty != 1 and (prompt or answer):
            context_ids = torch.tensor([*prompt, *answer], dtype=torch.int64, device=logits.device)
            logits = self._repetition(context_ids[None], logits[None])[0]
        logits = logits.index_add(0, self._bias_ids, self._biases)
        counts = torch.bincount(answer_ids, minlength=len(logits))
        return logits - params.frequency_penalty * counts - params.presence_penalty * counts.clamp(max=1)

    def _choose(self, logits: Tensor) -> int:
        if self._greedy:
            return int(logits.argmax())
        empty = torch.empty(1, 0, dtype=torch.int64, device=logits.device)
        warped = self._warpers(empty, logits[None])[0]
        return int(torch.multinomial(warped.softmax(-1), 1, generator=self._generator))
