"""Embed texts with a model of sentence-transformers.

Importing sentence-transformers takes seconds, because it imports its trainers, scikit-learn and more. The default
model, and others with mean pooling and normalisation alone, are run without it: the first embedding comes after 0.5 s
in place of 7 s (two cores, 2026-11-27).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from qcfuse_rag.errors import ModelNotFound, QCFuseError
from qcfuse_rag.models.cpu_threads import bound_threads
from qcfuse_rag.models.source import fetch_options, unreachable_reason

BATCH_TEXTS = 32
"""Texts in a pass, as in sentence-transformers."""


class Embedder:
    """Turn texts into unit vectors, by a sentence-transformers id or folder.

    Raises:
        ModelNotFound: if the model cannot be loaded.
        QCFuseError: if it needs sentence-transformers, which is not installed.
    """

    def __init__(self, name: str) -> None:
        fetch, folder = fetch_options(name), Path(name).expanduser()
        bound_threads()
        try:
            self._max_tokens = _mean_pooling_tokens(folder)
            if self._max_tokens is None:
                from sentence_transformers import SentenceTransformer

                self._model = SentenceTransformer(name, device="cpu", **fetch)
                self._tokenizer, self._max_tokens = self._model.tokenizer, self._model.max_seq_length
                self._encode = self._encode_by_sentence_transformers
            else:
                self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
                self._model = AutoModel.from_pretrained(folder, trust_remote_code=False).eval()
                self._encode = self._encode_by_mean_pooling
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
        read = self._tokenizer(list(texts), truncation=True, max_length=self._max_tokens)
        return sum(map(len, read["input_ids"]))

    def _encode_by_sentence_transformers(self, texts: list[str]) -> Any:
        return self._model.encode(texts, normalize_embeddings=True, show_progress_bar=False)

    @torch.inference_mode()
    def _encode_by_mean_pooling(self, texts: list[str]) -> Any:
        """Return the same numbers as sentence-transformers."""
        order = np.argsort([-len(text) for text in texts]).tolist()
        vectors: dict[int, NDArray[np.float32]] = {}
        for batch in (order[start : start + BATCH_TEXTS] for start in range(0, len(order), BATCH_TEXTS)):
            tokens = self._tokenizer(
                [texts[i] for i in batch],
                padding=True,
                truncation=True,
                max_length=self._max_tokens,
                return_tensors="pt",
            )
            hidden = self._model(**tokens).last_hidden_state
            mask = tokens["attention_mask"].unsqueeze(-1).expand(hidden.shape).to(hidden.dtype)
            pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
            vectors |= zip(batch, normalize(normalize(pooled)).numpy(), strict=True)
        return [vectors[i] for i in range(len(texts))]


def _mean_pooling_tokens(folder: Path) -> int | None:
    """Return how many tokens a model reads; None if its files do not say that it does mean pooling and no more."""

    def read(name: str) -> Any:
        return json.loads((folder / name).read_text("utf-8"))

    try:
        modules = [module["type"].rpartition(".")[2] for module in read("modules.json")]
        reading = read("sentence_bert_config.json")
        modes = [
            mode for mode, used in read("1_Pooling/config.json").items() if mode.startswith("pooling_mode_") and used
        ]
        plain = (
            read("config_sentence_transformers.json").keys() == {"__version__"}
            and reading.keys() == {"max_seq_length", "do_lower_case"}
            and not reading["do_lower_case"]
            and modes == ["pooling_mode_mean_tokens"]
            and modules == ["Transformer", "Pooling", "Normalize"]
        )
        return int(reading["max_seq_length"]) if plain else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
