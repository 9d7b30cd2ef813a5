"""From token ids to text as it can be shown: whole characters only, nothing beyond a stop string."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextAssembler:
    """Turns a growing sequence of tokens into pieces of text.

    Holds back bytes of an unfinished character and text that may be the beginning of a stop string.

    Args:
        tokenizer: the fast tokenizer's core.
        stop: strings that end the text and are cut off.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain, often empty. Sets `stopped` at a stop string."""
        self._held += self._stream.step(self._tokenizer, token) or ""
        ends = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self.stopped = True
            return self._release(min(ends))
        return self._release(len(self._held) - unfinished(self._held, self._stop))

    def flush(self) -> str:
        """Return what was held back, at the end of the answer; an unfinished character is dropped."""
        return "" if self.stopped else self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text


def unfinished(text: str, marks: tuple[str, ...]) -> int:
    """Return the length of the longest end of a text that may become one of these marks."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0
