"""Choose the next token from logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

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

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.generation.grammar import Constraint
from qcfuse_rag.runtime.language_model import LanguageModel

Fidelity = Literal["fast", "heal", "exact"]
"""How closely an answer follows full prefill's.

`fast` decodes over the fused cache as it is. `heal` recomputes the rest of the prompt while the answer is written, as
far as that slows no token much, so later tokens are nearer to full prefill's. `exact` shows no text before the prompt
is recomputed and the text is verified: a greedy answer is full prefill's, token for token.
"""

MIN_TEMPERATURE = 0.01
"""Lower temperatures, except 0, overflow; they are raised to it."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of one answer.

    Attributes:
        max_new_tokens: limit of the answer, in tokens.
        temperature: 0 takes the likeliest token; higher values give more varied answers.
        top_p: keep the likeliest tokens that together have this probability.
        top_k: keep this many likeliest tokens; 0 keeps all.
        min_p: keep the tokens that have at least this share of the likeliest token's probability.
        repetition_penalty: above 1 makes tokens of the prompt and the answer less likely (Keskar et al.,
            arXiv:1909.05858), below 1 more likely.
        presence_penalty: subtracted from the logits of tokens that the answer has, as in OpenAI's API.
        frequency_penalty: subtracted as often as the answer has the token, as in OpenAI's API.
        logit_bias: pairs of a token id and a number that is added to its logit.
        stop: strings that end the answer and are not part of it.
        special_tokens: whether the answer's text has the special tokens, by which some models delimit reasoning and
            tool calls; `generation.response_format` reads such text. The end token is never part of it.
        seed: of the random numbers; None takes a new seed each time.
        grammar: that the answer has to follow, see `generation.grammar`; None for any text.
        fidelity: see `Fidelity`. An answer that is sampled or has penalties or biases cannot be verified: `exact`
            then recomputes the prompt before the first token.
        logprobs: how many of the likeliest tokens to report for every token of the answer, beside the token itself, see
            `generation.logprobs`; None reports nothing.
        prompt_lookup_num_tokens: most candidates for the next tokens, see `generation.prompt_lookup`; None chooses
            their number on a CPU, 0 does without.
        slowdown: most that `heal` may slow an answer's tokens on average, as a share of their time; 0.1 is 10 %.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    special_tokens: bool = False
    seed: int | None = None
    grammar: str | None = None
    fidelity: Fidelity = "fast"
    slowdown: float = 0.1
    logprobs: int | None = None
    prompt_lookup_num_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be more than 0, got {self.repetition_penalty}")
        numbers = (self.presence_penalty, self.frequency_penalty, *(bias for _, bias in self.logit_bias))
        if not all(map(math.isfinite, numbers)):
            raise ValueError("presence_penalty, frequency_penalty and logit_bias must be finite numbers")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit 64 bits, got {self.seed}")
        if self.fidelity not in get_args(Fidelity):
            raise ValueError(f"fidelity must be fast, heal or exact, got {self.fidelity!r}")
        if self.slowdown < 0:
            raise ValueError(f"slowdown must not be negative, got {self.slowdown}")
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError(f"logprobs must not be negative, got {self.logprobs}")
        if self.prompt_lookup_num_tokens is not None and self.prompt_lookup_num_tokens < 0:
            raise ValueError(f"prompt_lookup_num_tokens must not be negative, got {self.prompt_lookup_num_tokens}")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ValueError(f"stop must be a sequence of non-empty strings, got {self.stop!r}")

    @property
    def adjusts_logits(self) -> bool:
        """Whether the answer has a penalty or a bias."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return bool(penalties or self.logit_bias)

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the model's likeliest; only such answers can be verified."""
        return self.temperature == 0 and not self.adjusts_logits


class Sampler:
    """Samples the tokens of one answer; holds the state of random numbers and grammar.

    Args:
        params: the settings.
        lm: the model.

    Raises:
        InvalidGrammar: if the grammar cannot be followed.
        QCFuseError: if there is a grammar and llguidance is not installed, or `logit_bias` names an id outside of
            the vocabulary.
    """

    def __init__(self, params: SamplingParams, lm: LanguageModel) -> None:
        self._params = params
        self._repetition = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))
        self._bias_ids = torch.tensor([token for token, _ in params.logit_bias], dtype=torch.int64, device=lm.device)
        self._biases = torch.tensor([bias for _, bias in params.logit_bias], device=lm.device)
        vocabulary = lm.model.get_input_embeddings().num_embeddings
        if unknown := [token for token, _ in params.logit_bias if not 0 <= token < vocabulary]:
            raise QCFuseError(f"logit_bias names token {unknown[0]}, and the model's tokens end at {vocabulary - 1}")
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
        """Choose a token.

        Args:
            logits: `[vocabulary]` float32.
            prompt: token ids of the prompt, for the repetition penalty.
            answer: token ids of the answer so far, for all penalties.
        """
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
