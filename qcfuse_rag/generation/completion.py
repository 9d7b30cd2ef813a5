"""The text of one answer while its tokens come, and their logarithmic probabilities.

The text has whole characters only, and nothing after a stop string. Probabilities are of the model's own distribution:
before penalties, biases, grammar, temperature and truncation, as vLLM gives them (`--logprobs-mode raw_logprobs`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from qcfuse_rag.generation.sampling_params import SamplingParams
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.language_model import LanguageModel

FinishReason = Literal["end", "stop", "length", "cancelled"]


class Completion:
    """Collects tokens and finishes at an end token, at a stop string or at the length limit."""

    def __init__(self, lm: LanguageModel, params: SamplingParams, prompt: Prompt) -> None:
        self.ids: list[int] = []  # the tokens so far, the end token included
        self.finish_reason: FinishReason | None = None  # None before the end; `cancelled` is for the caller to set
        self._end_tokens = end_tokens(lm)
        self._max_new_tokens = params.max_new_tokens
        core = lm.tokenizer.backend_tokenizer
        self._detokenizer = Detokenizer(core, params.stop, prompt, special_tokens=params.special_tokens)
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

    Holds back the bytes of an incomplete character, and text that may be the beginning of a stop string, which ends the
    text and is cut off. A prompt's `turn_starts` are such strings too, but not in reasoning. The text has special
    tokens only if asked.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        prompt: Prompt | None = None,
        *,
        special_tokens: bool = False,
    ) -> None:
        self.stopped = False
        self._tokenizer, self._stop, self._released = tokenizer, stop, ""
        self._turn_starts = () if prompt is None else prompt.turn_starts
        self._in_answer = None if prompt is None else prompt.in_answer
        self._skip_special_tokens, self._held = not special_tokens, ""
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain, often empty. Sets `stopped` at a stop string."""
        self._held += self._step(token)
        matches = [start for start in map(self._held.find, self._stop) if start >= 0]
        turns = [start for start in map(self._held.find, self._turn_starts) if start >= 0]
        in_answer = self._in_answer
        matches += [start for start in turns if not in_answer or in_answer(self._released + self._held[:start])]
        if matches:
            self.stopped = True
            return self._release(min(matches))
        return self._release(len(self._held) - partial_match_length(self._held, (*self._stop, *self._turn_starts)))

    def flush(self) -> str:
        """Return the held text at the end of the answer; an incomplete character is dropped."""
        return "" if self.stopped else self._release(len(self._held))

    def _step(self, token: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception:  # a plain one, of tokenizers, where a broken character changes the text of earlier bytes
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            return self._stream.step(self._tokenizer, token) or ""

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._released += text
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


LOWEST = -9999.0
"""OpenAI's number for a probability of 0, whose logarithm JSON cannot write."""

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # in vocabularies that have whole characters else

INCOMPLETE = "\ufffd"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural logarithm of a token's probability, at least `LOWEST`; and of the likeliest tokens' in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprob(logits: Tensor, token: int, count: int) -> TokenLogprob:
    """Return the logarithmic probability of a token, and of `count` likeliest ones, from `[vocabulary]` logits."""
    logprobs = logits.log_softmax(-1).clamp(min=LOWEST)
    best = logprobs.topk(min(count, len(logprobs)))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)


def content_logprobs(entries: Iterable[TokenLogprob], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return logarithmic probabilities as the list `content` of `logprobs` in OpenAI's chat completions.

    https://platform.openai.com/docs/api-reference/chat/object
    """

    def described(token: int, logprob: float) -> dict[str, Any]:
        content = token_bytes(tokenizer, token)
        return {"token": content.decode(errors="replace"), "logprob": logprob, "bytes": list(content)}

    return [
        {
            **described(entry.token, entry.logprob),
            "top_logprobs": [described(token, logprob) for token, logprob in entry.top],
        }
        for entry in entries
    ]


@cache
def _bytes_of_characters() -> dict[str, int]:
    return {character: byte for byte, character in bytes_to_unicode().items()}


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """Return the bytes that a token adds to a text, also those of an incomplete character.

    The token is decoded twice in a row and the first copy is cut off, because decoders strip a leading space.
    """
    backend = tokenizer.backend_tokenizer
    alone = backend.decode([token], skip_special_tokens=False)
    text: str = backend.decode([token, token], skip_special_tokens=False)[len(alone) :]
    if INCOMPLETE not in text:
        return text.encode()
    name: str = backend.id_to_token(token) or ""
    if match := BYTE_TOKEN.fullmatch(name):
        return bytes([int(match[1], 16)])
    bytes_of = _bytes_of_characters()
    if all(character in bytes_of for character in name):  # a byte-level vocabulary
        return bytes(bytes_of[character] for character in name)
    return text.encode()
