"""Embed texts with a BERT-like model, mean pooling and normalisation, without importing sentence-transformers.

Importing sentence-transformers takes longer than loading such a model, because it imports its trainers, scikit-learn
and more. Models that do anything else need it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

BATCH_TEXTS = 32
"""Texts in a pass, as in sentence-transformers."""
MODULES = ["Transformer", "Pooling", "Normalize"]


class MeanPoolingModel:
    """A model that sentence-transformers composes of a transformer, mean pooling over tokens, and normalisation.

    Args:
        folder: of the model.
        max_tokens: tokens of a text that are read.
    """

    def __init__(self, folder: Path, max_tokens: int) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self._model = AutoModel.from_pretrained(folder, trust_remote_code=False).eval()
        self._max_tokens = max_tokens

    @classmethod
    def load(cls, name: str) -> Self | None:
        """Load a model from a folder; None if the folder's files do not say that it is one of these."""
        folder = Path(name).expanduser()
        try:
            modules = [module["type"].rpartition(".")[2] for module in _read(folder / "modules.json")]
            pooling, reading = _read(folder / "1_Pooling" / "config.json"), _read(folder / "sentence_bert_config.json")
            about = _read(folder / "config_sentence_transformers.json")
            modes = [mode for mode, used in pooling.items() if mode.startswith("pooling_mode_") and used]
            plain = about.keys() == {"__version__"} and reading.keys() == {"max_seq_length", "do_lower_case"}
            if modules != MODULES or modes != ["pooling_mode_mean_tokens"] or not plain or reading["do_lower_case"]:
                return None
            max_tokens = int(reading["max_seq_length"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return cls(folder, max_tokens)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return `[N, D]` float32 vectors of length 1, the same numbers as those of sentence-transformers."""
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
        return np.array([vectors[i] for i in range(len(texts))], dtype=np.float32)

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Return the number of tokens that are read of texts."""
        read = self._tokenizer(list(texts), truncation=True, max_length=self._max_tokens)
        return sum(map(len, read["input_ids"]))


def _read(file: Path) -> Any:
    return json.loads(file.read_text("utf-8"))
