"""Logarithmic probabilities of an answer's tokens, and of the likeliest tokens in their places.

They are of the model's own distribution: before penalties, biases, grammar, temperature and truncation, as vLLM gives
them by default (`--logprobs-mode raw_logprobs`).
https://platform.openai.com/docs/api-reference/chat/object
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

LOWEST = -9999.0
"""OpenAI's number for a probability of 0, whose logarithm JSON cannot write."""

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Matches a token that is one byte, in vocabularies that have whole characters else."""

INCOMPLETE = "\ufffd"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The logarithmic probability of a token of an answer.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability, at least `LOWEST`.
        top: ids and logarithmic probabilities of the likeliest tokens in its place, the likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprob(logits: Tensor, token: int, count: int) -> TokenLogprob:
    """Return the logarithmic probability of a token, and of the likeliest tokens.

    Args:
        logits: `[vocabulary]` float32, as the model computed them.
        token: the chosen token.
        count: number of likeliest tokens.
    """
    logprobs = logits.log_softmax(-1).clamp(min=LOWEST)
    best = logprobs.topk(min(count, len(logprobs)))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)


def content_logprobs(entries: Iterable[TokenLogprob], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return logarithmic probabilities as the list `content` of `logprobs` in OpenAI's chat completions.

    Args:
        entries: of the answer's tokens, without its end token: that is no content.
        tokenizer: of the model.
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


@cache
def _bytes_of_characters() -> dict[str, int]:
    """Return the byte for each character of byte-level vocabularies."""
    return {character: byte for byte, character in bytes_to_unicode().items()}
