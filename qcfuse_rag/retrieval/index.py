"""A small exact vector index in a folder: passages as JSON lines, embeddings as an array beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.store.atomic_write import write_atomically

PASSAGES, EMBEDDINGS, ABOUT = "passages.jsonl", "embeddings.npy", "about.json"


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
        embedder: name of the embedding model; vectors of different models cannot be compared.
        passages: in any order.
        embeddings: `[N, D]` float32, rows of length 1, in the order of the passages.
    """

    def __init__(
        self, embedder: str, passages: Sequence[Passage] = (), embeddings: NDArray[np.float32] | None = None
    ) -> None:
        self.embedder = embedder
        self.passages = list(passages)
        self.embeddings = np.zeros((0, 0), np.float32) if embeddings is None else embeddings

    def replace(self, documents: Mapping[str, Sequence[str]], embeddings: NDArray[np.float32]) -> None:
        """Put documents' passages in the place of those they had.

        Args:
            documents: source -> its passages.
            embeddings: `[N, D]` of all these passages, in order.
        """
        self.remove(set(documents))
        added = [Passage(source, text) for source, texts in documents.items() for text in texts]
        if added:
            old = self.embeddings if self.passages else embeddings[:0]
            self.passages += added
            self.embeddings = np.concatenate([old, embeddings])

    def by_source(self) -> dict[str, list[str]]:
        """Return each document's passages, in order."""
        texts: dict[str, list[str]] = {}
        for passage in self.passages:
            texts.setdefault(passage.source, []).append(passage.text)
        return texts

    def remove(self, sources: set[str]) -> None:
        """Take documents out."""
        kept = [i for i, passage in enumerate(self.passages) if passage.source not in sources]
        self.passages, self.embeddings = [self.passages[i] for i in kept], self.embeddings[kept]

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return `[len(texts), D]`, the embeddings of passages that are in the index.

        Raises:
            KeyError: if one is not.
        """
        rows = {passage.text: row for row, passage in enumerate(self.passages)}
        return self.embeddings[[rows[text] for text in texts]]

    def search(self, query: NDArray[np.float32], k: int) -> list[Passage]:
        """Return the `k` passages nearest to a query embedding `[D]`, best first."""
        if not self.passages:
            return []
        order = np.argsort(-(self.embeddings @ query), kind="stable")[:k]
        return [self.passages[i] for i in order]

    def save(self, folder: Path) -> None:
        """Write to a folder, for its owner only; what was there stays valid until the last moment."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lines = "".join(json.dumps({"source": p.source, "text": p.text}) + "\n" for p in self.passages)
        part = folder / f"{EMBEDDINGS}.part"
        part.unlink(missing_ok=True)
        part.touch(mode=0o600)
        with open(part, "wb") as file:
            np.save(file, self.embeddings, allow_pickle=False)
        write_atomically(folder / ABOUT, json.dumps({"embedder": self.embedder}))
        write_atomically(folder / PASSAGES, lines)
        part.replace(folder / EMBEDDINGS)

    @classmethod
    def load(cls, folder: Path, embedder: str | None = None) -> PassageIndex:
        """Read from a folder.

        Args:
            folder: that it was saved to.
            embedder: what questions will be embedded with; None if none will be.

        Raises:
            QCFuseError: if there is no index, its files do not belong together, or it was made with another embedder.
        """
        try:
            passages = read_passages(folder)
            embeddings = np.load(folder / EMBEDDINGS, allow_pickle=False)
            made_with = json.loads((folder / ABOUT).read_text("utf-8"))["embedder"]
        except FileNotFoundError as error:
            raise QCFuseError(f"no passages in {folder}; run `qcfuse warm run` on some documents first") from error
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise QCFuseError(
                f"cannot read {folder} ({error}); remove that folder and run `qcfuse warm run`"
            ) from error
        if len(passages) != len(embeddings):
            raise QCFuseError(f"the files in {folder} do not match; remove that folder and run `qcfuse warm run`")
        if embedder is not None and made_with != embedder:
            raise QCFuseError(f"{folder} was made with the embedder {made_with!r}; name it with --embedder")
        return cls(made_with, passages, embeddings)


def read_passages(folder: Path) -> list[Passage]:
    """Read an index's passages alone.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is no such file.
        TypeError: if a line is of something else.
    """
    return [Passage(**json.loads(line)) for line in (folder / PASSAGES).read_text("utf-8").splitlines()]
