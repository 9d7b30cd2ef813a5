"""The text of one answer while its tokens come: whole characters only, nothing after a stop string, and its end."""

from __future__ import annotations

from typing import Literal

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from qcfuse_rag.generation.sampling_params import SamplingParams
from qcfuse_rag.runtime.language_model import LanguageModel

FinishReason = Literal["end", "stop", "length", "cancelled"]


class Completion:
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

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain, often empty."""
        self.ids.append(token)
        if token in self._end_tokens:
            self.finish_reason = "end"
            return ""
        self._pieces.append(self._detokenizer.push(token))
        if self._detokenizer.stopped:
            self.finish_reason = "stop"
        elif len(self.ids) >= self._max_new_tokens:
            self.finish_reason = "length"
        return self._pieces[-1]

    def finish(self) -> str:
        """Return the text that was held back, once the answer is finished."""
        self._pieces.append(self._detokenizer.flush())
        return self._pieces[-1]


class Detokenizer:
    """Turns a growing sequence of tokens into pieces of text.

    Holds back the bytes of an incomplete character, and text that may be the beginning of a stop string.

    Args:
        tokenizer: the backend of a fast tokenizer.
        stop: strings that end the text and are cut off.
        special_tokens: whether the text has special tokens.

    Attributes:
        stopped: whether a stop string was reached.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], *, special_tokens: bool = False) -> None:
        self.stopped = False
        self._tokenizer, self._stop = tokenizer, stop
        self._skip_special_tokens = not special_tokens
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        self._held = ""

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain, often empty. Sets `stopped` at a stop string."""
        self._held += self._step(token)
        matches = [start for start in map(self._held.find, self._stop) if start >= 0]
        if matches:
            self.stopped = True
            return self._release(min(matches))
        return self._release(len(self._held) - partial_match_length(self._held, self._stop))

    def flush(self) -> str:
        """Return the held text at the end of the answer; an incomplete character is dropped."""
        return "" if self.stopped else self._release(len(self._held))

    def _step(self, token: int) -> str:
        """Return the characters that a token completes.

        Where tokens are bytes, a broken character makes the stream decode its run of bytes anew and fail, because the
        run begins with other text than before. Decoding then begins again at this token.
        """
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception:  # a plain one, of tokenizers
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            return self._stream.step(self._tokenizer, token) or ""

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text


def partial_match_length(text: str, strings: tuple[str, ...]) -> int:
    """Return the length of the longest suffix of a text that is a proper prefix of one of the strings."""
    longest = max(map(len, strings), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-size:]) for string in strings):
            return size
    return 0


def end_tokens(lm: LanguageModel) -> frozenset[int]:
    """Return the tokens that end an answer, from the model's generation settings and its tokenizer."""
    config = lm.model.generation_config
    configured = config.eos_token_id if config is not None else None
    ids = set(configured) if isinstance(configured, list) else {configured}
    return frozenset(token for token in ids | {lm.tokenizer.eos_token_id} if token is not None)
