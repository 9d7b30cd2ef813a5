"""Embed texts with a model of sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qcfuse_rag.errors import ModelNotFound, QCFuseError
from qcfuse_rag.library.mean_pooling import MeanPoolingModel
from qcfuse_rag.models.hub import fetch_options, unreachable_reason


class Embedder:
    """Turn texts into unit vectors, by a sentence-transformers id or folder.

    Raises:
        ModelNotFound: if the model cannot be loaded.
        QCFuseError: if it needs sentence-transformers, which is not installed.
    """

    def __init__(self, name: str) -> None:
        fetch = fetch_options(name)
        try:
            self._encode = MeanPoolingModel.load(name) or _SentenceTransformer(name, fetch)
        except ImportError as error:
            raise QCFuseError(f"{error.name} is missing; run `pip install 'qcfuse-rag[cli]'`") from error
        except Exception as error:  # what a broken file makes its parser raise has no bound
            if fetch:
                raise ModelNotFound(unreachable_reason(name)) from error
            raise ModelNotFound(f"cannot load the embedding model {name!r}: {error}") from error

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return `[N, D]` float32 vectors of length 1."""
        return np.asarray(self._encode(list(texts)), dtype=np.float32)

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Return the number of tokens that the model reads of texts; it leaves out what is after its limit."""
        return self._encode.count_tokens(list(texts))


class _SentenceTransformer:
    """A model that sentence-transformers runs."""

    def __init__(self, name: str, fetch: dict[str, Any]) -> None:
        from sentence_transformers import SentenceTransformer  # imports trainers and scikit-learn, which takes seconds

        self._model = SentenceTransformer(name, device="cpu", **fetch)

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = self._model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(vectors, dtype=np.float32)

    def count_tokens(self, texts: Sequence[str]) -> int:
        read = self._model.tokenizer(list(texts), truncation=True, max_length=self._model.max_seq_length)
        return sum(map(len, read["input_ids"]))
