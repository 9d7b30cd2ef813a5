"""Read documents and split them into passages, for the command line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from semantic_text_splitter import MarkdownSplitter, TextSplitter
from transformers import PreTrainedTokenizerBase

from qcfuse_rag.errors import QCFuseError

TEXT_ENDINGS = {".txt", ".md", ".markdown", ".rst"}


def find_documents(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the text files among paths and in folders below them, in order.

    Raises:
        QCFuseError: if a path does not exist, or a file named outright is not text.
    """
    for path in paths:
        if path.is_dir():
            yield from sorted(p for p in path.rglob("*") if p.suffix.lower() in TEXT_ENDINGS and p.is_file())
        elif not path.exists():
            raise QCFuseError(f"no file or folder at {path}")
        elif path.suffix.lower() not in TEXT_ENDINGS:
            raise QCFuseError(f"{path} is not a text file ({', '.join(sorted(TEXT_ENDINGS))}); convert it first")
        else:
            yield path


def split_document(path: Path, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int) -> list[str]:
    """Split a file at its own structure into passages of at most `max_tokens` tokens.

    Raises:
        QCFuseError: if the file cannot be read as UTF-8 text.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise QCFuseError(f"cannot read {path}: {error}") from error
    kind = MarkdownSplitter if path.suffix.lower() in {".md", ".markdown"} else TextSplitter
    return list(kind.from_huggingface_tokenizer(tokenizer.backend_tokenizer, max_tokens).chunks(text))
