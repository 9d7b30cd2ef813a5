"""Collect the tokens of one answer and decide when the answer is finished."""

from __future__ import annotations

from typing import Literal

from qcfuse_rag.generation.detokenizer import Detokenizer
from qcfuse_rag.generation.sampling_params import SamplingParams
from qcfuse_rag.runtime.language_model import LanguageModel

FinishReason = Literal["end", "stop", "length", "cancelled"]


class PartialAnswer:
    """Collects tokens and finishes at an end token, at a stop string or at the length limit.

    Args:
        lm: the model that the tokens belong to.
        params: stop strings, length limit and form of the text; the sampling settings are not read.

    Attributes:
        ids: the tokens so far, the end token included.
        finish_reason: why the answer is finished, or None before that. `cancelled` is for the caller to set.
    """

    def __init__(self, lm: LanguageModel, params: SamplingParams) -> None:
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._end_tokens = end_tokens(lm)
        self._max_new_tokens = params.max_new_tokens
        core = lm.tokenizer.backend_tokenizer
        self._detokenizer = Detokenizer(core, params.stop, special_tokens=params.special_tokens)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text that is certain so far; the whole text after `finish`."""
        return "".join(self._pieces)

    @property
    def remaining(self) -> int:
        """Number of tokens until the length limit."""
        return self._max_new_tokens - len(self.ids)

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain, often empty. May set `finish_reason`."""
        self.ids.append(token)
        if token in self._end_tokens:
            self.finish_reason = "end"
            return ""
        piece = self._append(self._detokenizer.push(token))
        if self._detokenizer.stopped:
            self.finish_reason = "stop"
        elif not self.remaining:
            self.finish_reason = "length"
        return piece

    def finish(self) -> str:
        """Return the text that was held back, once the answer is finished."""
        return self._append(self._detokenizer.flush())

    def _append(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece


def end_tokens(lm: LanguageModel) -> frozenset[int]:
    """Return the tokens that end an answer, from the model's generation settings and its tokenizer."""
    config = lm.model.generation_config
    configured = config.eos_token_id if config is not None else None
    ids = set(configured) if isinstance(configured, list) else {configured}
    return frozenset(token for token in ids | {lm.tokenizer.eos_token_id} if token is not None)
