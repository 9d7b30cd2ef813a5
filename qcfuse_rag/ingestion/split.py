"""Split text into passages, for the command line."""

from __future__ import annotations

from semantic_text_splitter import MarkdownSplitter, TextSplitter
from transformers import PreTrainedTokenizerBase

PAGE_BREAK = "\f"


class TextSplitting:
    """Splits text at its own structure.

    Args:
        tokenizer: measures passages.
        max_tokens: most tokens of a passage.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        backend = tokenizer.backend_tokenizer
        self._plain = TextSplitter.from_huggingface_tokenizer(backend, max_tokens)
        self._markdown = MarkdownSplitter.from_huggingface_tokenizer(backend, max_tokens)

    def split(self, text: str, *, markdown: bool) -> list[str]:
        """Return the passages of a text; the page breaks of extracted PDF count as blank lines."""
        splitter = self._markdown if markdown else self._plain
        return list(splitter.chunks(text.replace(PAGE_BREAK, "\n\n")))
