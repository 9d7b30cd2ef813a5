"""A small exact vector index in a folder: passages as JSON lines, embeddings as an array beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qcfuse_rag.errors import QCFuseError

PASSAGES, EMBEDDINGS = "passages.jsonl", "embeddings.npy"


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document: its text, and the file it came from."""

    source: str
    text: str


class PassageIndex:
    """Passages and their embeddings, searched by cosine over all of them.

    Exact and without a server; for corpora beyond some 100,000 passages use a vector store through LlamaIndex or
    LangChain.

    Args:
        passages: in any order.
        embeddings: `[N, D]` float32, rows of length 1, in the order of the passages.
    """

    def __init__(self, passages: Sequence[Passage] = (), embeddings: NDArray[np.float32] | None = None) -> None:
        self.passages = list(passages)
        self.embeddings = np.zeros((0, 0), np.float32) if embeddings is None else embeddings

    def replace(self, source: str, texts: Sequence[str], embeddings: NDArray[np.float32]) -> None:
        """Put a document's passages in the place of those it had."""
        kept = [i for i, passage in enumerate(self.passages) if passage.source != source]
        old = self.embeddings[kept] if kept else embeddings[:0]
        self.passages = [self.passages[i] for i in kept] + [Passage(source, text) for text in texts]
        self.embeddings = np.concatenate([old, embeddings])

    def search(self, query: NDArray[np.float32], k: int) -> list[Passage]:
        """Return the `k` passages nearest to a query embedding `[D]`, best first."""
        if not self.passages:
            return []
        order = np.argsort(-(self.embeddings @ query), kind="stable")[:k]
        return [self.passages[i] for i in order]

    def save(self, folder: Path) -> None:
        """Write to a folder; what was there stays valid until the last moment."""
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps({"source": p.source, "text": p.text}) + "\n" for p in self.passages)
        (folder / f"{PASSAGES}.part").write_text(lines, "utf-8")
        with open(folder / f"{EMBEDDINGS}.part", "wb") as file:
            np.save(file, self.embeddings, allow_pickle=False)
        for name in (PASSAGES, EMBEDDINGS):
            os.replace(folder / f"{name}.part", folder / name)

    @classmethod
    def load(cls, folder: Path) -> PassageIndex:
        """Read from a folder.

        Raises:
            QCFuseError: if there is no index, or its two files do not belong together.
        """
        try:
            lines = (folder / PASSAGES).read_text("utf-8").splitlines()
            passages = [Passage(**json.loads(line)) for line in lines]
            embeddings = np.load(folder / EMBEDDINGS, allow_pickle=False)
        except FileNotFoundError as error:
            raise QCFuseError(f"no passages in {folder}; run `qcfuse warm` on some documents first") from error
        except (OSError, ValueError, TypeError) as error:
            raise QCFuseError(f"the passages in {folder} cannot be read ({error}); run `qcfuse warm` again") from error
        if len(passages) != len(embeddings):
            raise QCFuseError(f"the passages and embeddings in {folder} differ in number; run `qcfuse warm` again")
        return cls(passages, embeddings)
