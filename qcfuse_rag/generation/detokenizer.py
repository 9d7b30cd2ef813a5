"""Turn token ids into text to show: whole characters only, and nothing after a stop string."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


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
        self._tokenizer = tokenizer
        self._skip_special_tokens = not special_tokens
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        self._stop = stop
        self._held = ""

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain, often empty. Sets `stopped` at a stop string."""
        self._held += self._step(token)
        matches = [start for start in map(self._held.find, self._stop) if start >= 0]
        if matches:
            self.stopped = True
            return self._release(min(matches))
        return self._release(len(self._held) - partial_match_length(self._held, self._stop))

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

    def flush(self) -> str:
        """Return the held text at the end of the answer; an incomplete character is dropped."""
        return "" if self.stopped else self._release(len(self._held))

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
