"""Embed texts with sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from qcfuse_rag.errors import ModelNotFound
from qcfuse_rag.models.hub import fetch_options, unreachable_reason


class Embedder:
    """Turn texts into unit vectors, by a sentence-transformers id or folder.

    Raises:
        ModelNotFound: if the model cannot be loaded.
    """

    def __init__(self, name: str) -> None:
        fetch = fetch_options(name)
        try:
            self._model = SentenceTransformer(name, device="cpu", **fetch)
        except Exception as error:  # what a broken file makes its parser raise has no bound
            if fetch:
                raise ModelNotFound(unreachable_reason(name)) from error
            raise ModelNotFound(f"cannot load the embedding model {name!r}: {error}") from error

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return `[N, D]` float32 vectors of length 1."""
        vectors = self._model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(vectors, dtype=np.float32)

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Return the number of tokens that the model reads of texts; it leaves out what is behind its limit."""
        read = self._model.tokenizer(list(texts), truncation=True, max_length=self._model.max_seq_length)
        return sum(map(len, read["input_ids"]))
