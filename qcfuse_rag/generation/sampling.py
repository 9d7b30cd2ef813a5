"""Choose the next token from logits."""

from __future__ import annotations

from collections.abc import Sequence

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
from qcfuse_rag.generation.sampling_params import SamplingParams
from qcfuse_rag.runtime.language_model import LanguageModel

MIN_TEMPERATURE = 0.01
"""Lower temperatures, except 0, overflow; they are raised to it."""


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
