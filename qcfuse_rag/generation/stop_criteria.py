"""An answer in the making: which tokens it has, what of its text is certain, and when it is over."""

from __future__ import annotations

from typing import Literal

from qcfuse_rag.generation.detokenizer import TextAssembler
from qcfuse_rag.generation.sampling import SamplingParams
from qcfuse_rag.runtime.language_model import LanguageModel

FinishReason = Literal["end", "stop", "length", "cancelled"]


class Answer:
    """Takes tokens one by one, from wherever they come, and ends by the model's end tokens, stop strings and length.

    Args:
        lm: whose tokens.
        params: when to stop; how tokens are chosen is not looked at.

    Attributes:
        ids: the tokens so far, the end token included.
        reason: why it is over, or None while it is not. `cancelled` is for the caller to set.
    """

    def __init__(self, lm: LanguageModel, params: SamplingParams) -> None:
        self.ids: list[int] = []
        self.reason: FinishReason | None = None
        self._ends = end_tokens(lm)
        self._most = params.max_new_tokens
        self._assembler = TextAssembler(lm.tokenizer.backend_tokenizer, params.stop)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text that is certain so far; all of it after `finish`."""
        return "".join(self._pieces)

    @property
    def left(self) -> int:
        """How many more tokens it may take."""
        return self._most - len(self.ids)

    def ends_with(self, token: int) -> bool:
        """Return whether a token is one of the model's that end an answer."""
        return token in self._ends

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain, often empty. Sets `reason` when the answer is over."""
        self.ids.append(token)
        if token in self._ends:
            self.reason = "end"
            return ""
        piece = self._keep(self._assembler.push(token))
        if self._assembler.stopped:
            self.reason = "stop"
        elif not self.left:
            self.reason = "length"
        return piece

    def finish(self) -> str:
        """Return text that was held back, once the answer is over."""
        return self._keep(self._assembler.flush())

    def _keep(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece


def end_tokens(lm: LanguageModel) -> frozenset[int]:
    """Return the tokens that end an answer, by the model's generation settings and its tokenizer."""
    config = lm.model.generation_config
    listed = config.eos_token_id if config is not None else None
    ends = set(listed) if isinstance(listed, list) else {listed}
    return frozenset(token for token in ends | {lm.tokenizer.eos_token_id} if token is not None)
