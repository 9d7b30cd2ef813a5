"""Embed texts with a model of sentence-transformers.

Importing sentence-transformers takes seconds, because it imports its trainers, scikit-learn and more. The default
model, and others with mean pooling and normalisation alone, are run without it: the first embedding comes after 0.5 s
in place of 7 s (two cores, 2026-11-27).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
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

WINDOWS, OVERLAP = 2, 8
"""A window has half of the tokens that a model reads, since models weigh beginnings more; windows share an eighth."""

SCRIPT_NOTE = (
    "most letters of these documents are of a script that the embedding model was not made for, so that questions find "
    "little; name a multilingual one for a new library, such as --embedder intfloat/multilingual-e5-small"
)


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
            self._has_offsets = getattr(self._tokenizer, "is_fast", False)
        except ImportError as error:
            raise QCFuseError(f"{error.name} is missing; run `pip install 'qcfuse-rag[cli]'`") from error
        except Exception as error:  # what a broken file makes its parser raise has no bound
            if fetch:
                raise ModelNotFound(unreachable_reason(name)) from error
            raise ModelNotFound(f"cannot load the embedding model {name!r}: {error}") from error

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return `[N, D]` float32 vectors of length 1."""
        return np.asarray(self._encode(list(texts)), dtype=np.float32)

    def windows(self, texts: Sequence[str]) -> list[NDArray[np.float32]]:
        """Return for each text `[W, D]` vectors of length 1, of windows of equal length that overlap.

        A text of at most half of what the model reads is one window, and every text for a model without a limit.
        """
        parts = [[text] for text in texts]
        if self._max_tokens is not None and self._has_offsets and parts:
            read = self._tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            spans, most = read["offset_mapping"], int(self._max_tokens) // WINDOWS
            parts = [_cut(text, of_text, most) for text, of_text in zip(texts, spans, strict=True)]
        vectors = self([part for of_text in parts for part in of_text])
        ends = accumulate(map(len, parts))
        return [vectors[end - len(of_text) : end] for of_text, end in zip(parts, ends, strict=True)]

    def script_note(self, texts: Sequence[str]) -> str | None:
        """Return what to do if most letters are of a script that the model was not made for; None if they are not.

        Its tokenizer shows that: it does not know these letters, or reads words one letter at a time.
        """
        some, letters, unread = texts[:: len(texts) // 64 + 1], 0, 0
        if not self._has_offsets or not some:
            return None
        read = self._tokenizer(list(some), add_special_tokens=False, verbose=False).encodings
        for text, encoding in zip(some, read, strict=True):
            for token, (start, end), word in zip(encoding.ids, encoding.offsets, encoding.word_ids, strict=True):
                size, (word_start, word_end) = sum(map(str.isalpha, text[start:end])), encoding.word_to_chars(word)
                is_alone = end - start == 1 < word_end - word_start
                letters, unread = letters + size, unread + size * (is_alone or token == self._tokenizer.unk_token_id)
        return SCRIPT_NOTE if unread > letters / 2 else None

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


def _cut(text: str, spans: Sequence[tuple[int, int]], most: int) -> list[str]:
    """Cut a text into as few windows as have at most so many of its tokens, given the tokens' places in it."""
    overlap = most // OVERLAP
    count = -(-(len(spans) - overlap) // (most - overlap))
    if count < 2:
        return [text]
    step = -(-(len(spans) - overlap) // count)
    ends = [min((number + 1) * step + overlap, len(spans)) for number in range(count)]
    return [text[spans[number * step][0] : spans[end - 1][1]] for number, end in enumerate(ends)]


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
