"""The settings of one answer; this module imports no model code, because the command line reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt, Le, Lt

from qcfuse_rag.declared_options import check_limits

Fidelity = Literal["fast", "exact"]
"""How closely an answer follows full prefill's.

`fast` decodes over the fused cache as it is. `exact` shows no text before the prompt is recomputed and the text is
verified: a greedy answer is full prefill's, token for token.
"""

SAMPLING_SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "fidelity",
)
"""The settings that the frameworks' classes and the server's requests have, under the same names."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of one answer.

    Attributes:
        max_new_tokens: Limit of the answer, in tokens.
        temperature: 0 takes the likeliest token; higher values give more varied answers.
        top_p: Keep the likeliest tokens that together have this probability; at least one.
        top_k: Keep this many likeliest tokens; 0 keeps all.
        min_p: Keep the tokens that have at least this share of the likeliest token's probability.
        repetition_penalty: Above 1 makes tokens of the prompt and the answer less likely (Keskar et al.,
            arXiv:1909.05858), below 1 more likely.
        presence_penalty: Subtracted from the logits of tokens that the answer has, as in OpenAI's API.
        frequency_penalty: Subtracted as often as the answer has the token, as in OpenAI's API.
        logit_bias: Pairs of a token id and a number that is added to its logit.
        stop: Strings that end the answer and are not part of it.
        special_tokens: Whether the answer's text has the special tokens, by which some models delimit reasoning and
            tool calls; `generation.response_format` reads such text. The end token is never part of it.
        seed: Of the random numbers; None takes a new seed each time.
        grammar: That the answer has to follow, see `generation.sampling`; None for any text.
        fidelity: fast: answer over the reused caches; exact: show nothing before it is full prefill's greedy answer.
            An answer that is sampled or has penalties or biases cannot be verified: exact then recomputes the prompt
            before the first token.
        logprobs: How many of the likeliest tokens to report for every token of the answer, beside the token itself, see
            `generation.completion`; None reports nothing.
        prompt_lookup_num_tokens: Most candidates for the next tokens, see `generation.prompt_lookup`; None chooses
            their number on a CPU, 0 does without.
    """

    max_new_tokens: Annotated[int, Ge(1)] = 256
    temperature: Annotated[float, Ge(0)] = 0.0
    top_p: Annotated[float, Ge(0), Le(1)] = 1.0
    top_k: Annotated[int, Ge(0)] = 0
    min_p: Annotated[float, Ge(0), Le(1)] = 0.0
    repetition_penalty: Annotated[float, Gt(0), Lt(math.inf)] = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    special_tokens: bool = False
    seed: Annotated[int | None, Ge(-(2**63)), Lt(2**63)] = None
    grammar: str | None = None
    fidelity: Fidelity = "fast"
    logprobs: Annotated[int | None, Ge(0)] = None
    prompt_lookup_num_tokens: Annotated[int | None, Ge(0)] = None

    def __post_init__(self) -> None:
        check_limits(self)
        numbers = (self.presence_penalty, self.frequency_penalty, *(bias for _, bias in self.logit_bias))
        if not all(map(math.isfinite, numbers)):
            raise ValueError("presence_penalty, frequency_penalty and logit_bias must be finite numbers")
        if self.fidelity not in get_args(Fidelity):
            raise ValueError(f"fidelity must be fast or exact, got {self.fidelity!r}")
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
