"""A small exact vector index in a folder, and the log of what was retrieved from it.

The index is passages as JSON lines, and their embeddings as an array. The log tells what to warm first and which
passages are neighbours; it never contains questions or their hashes, only hashes of one retrieval's passages a line.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import compress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.bundled import default_embedder
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.models.fingerprint import digest

METADATA = "about.json"
"""Names the embedding model, and the token in the names of the other two files."""
PART = r"(\.([0-9a-f]+\.)?part)?"
DATA_FILE = re.compile(rf"(passages-[0-9a-f]+\.jsonl|embeddings-[0-9a-f]+\.npy){PART}")
"""Name of a file of passages or embeddings, in use or not."""
LOG_NAME = "retrievals.jsonl"
INDEX_FILE = re.compile(rf"{DATA_FILE.pattern}|({re.escape(METADATA)}|{re.escape(LOG_NAME)}){PART}")
"""Name of a file in a passage folder."""
ALMOST_EQUAL = 0.98
"""Cosine similarity above which passages may differ in nothing but whitespace."""
DEFAULT_EMBEDDER = "all-MiniLM-L6-v2"
"""Name of the embedding model that is used if none is named; it comes as a wheel."""


@dataclass(frozen=True, slots=True)
class IndexedPassage:
    """A passage of a document: its text and source."""

    source: str
    text: str


class PassageIndex:
    """Passages and the embeddings of their windows, with exact search by cosine similarity to the nearest window.

    A passage has the next `windows` of the embeddings, `[M, D]` float32 of length 1; none means one of its beginning
    alone, as earlier versions made it.

    For corpora of more than about 100,000 passages use a vector store through LlamaIndex or LangChain. The embedding
    model has a name, because vectors of different models cannot be compared.
    """

    def __init__(
        self,
        embedder: str,
        passages: Sequence[IndexedPassage] = (),
        embeddings: NDArray[np.float32] | None = None,
        windows: Sequence[int] | None = None,
    ) -> None:
        self.embedder = embedder
        self.metadata: bytes | None = None  # of the files that it was read from or written to, see `is_current`
        self.passages = list(passages)
        self.embeddings = np.zeros((0, 0), np.float32) if embeddings is None else embeddings
        self.windows = np.array([1] * len(self.passages) if windows is None else windows, np.int64)

    def replace(self, documents: Mapping[str, Sequence[str]], embeddings: Sequence[NDArray[np.float32]]) -> None:
        """Replace the passages of documents; the embeddings, `[W, D]` each, are of all these passages, in order."""
        self.remove(set(documents))
        added = [IndexedPassage(source, text) for source, texts in documents.items() for text in texts]
        if added:
            old = [self.embeddings] if self.passages else []
            self.passages += added
            self.embeddings = np.concatenate([*old, *embeddings])
            self.windows = np.concatenate([self.windows, [*map(len, embeddings)]])

    def by_source(self) -> dict[str, list[str]]:
        """Return each document's passages, in order."""
        texts: dict[str, list[str]] = {}
        for passage in self.passages:
            texts.setdefault(passage.source, []).append(passage.text)
        return texts

    def remove(self, sources: set[str]) -> None:
        """Remove documents by their sources."""
        kept = np.array([passage.source not in sources for passage in self.passages], bool)
        if kept.all():
            return
        self.embeddings = self.embeddings[np.repeat(kept, np.maximum(self.windows, 1))]
        self.passages, self.windows = [*compress(self.passages, kept)], self.windows[kept]

    @property
    def outdated(self) -> dict[str, list[str]]:
        """The documents and passages of which an earlier version embedded the beginnings alone."""
        sources = {passage.source for passage, count in zip(self.passages, self.windows, strict=True) if not count}
        return {source: texts for source, texts in self.by_source().items() if source in sources}

    @property
    def _starts(self) -> NDArray[np.int64]:
        """The row of each passage's first embedding."""
        counts = np.maximum(self.windows, 1)
        return np.cumsum(counts) - counts

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the mean directions of passages in the index, `[len(texts), D]` of length 1."""
        rows = {passage.text: row for row, passage in enumerate(self.passages)}
        sums = np.add.reduceat(self.embeddings, self._starts)[[rows[text] for text in texts]]
        return np.asarray(sums / np.linalg.norm(sums, axis=1, keepdims=True), np.float32)

    def search(self, queries: NDArray[np.float32], k: int) -> list[tuple[int, float]]:
        """Return row and cosine similarity of the `k` passages nearest to any query embedding `[Q, D]`, best first.

        Passages that differ in nothing but whitespace count once.
        """
        if not self.passages:
            return []
        similarity = np.maximum.reduceat((self.embeddings @ queries.T).max(axis=1), self._starts)
        rows: dict[str, int] = {}
        for row in np.argsort(-similarity, kind="stable"):
            if len(rows) >= k:
                break
            rows.setdefault(" ".join(self.passages[row].text.split()), int(row))
        return [(row, float(similarity[row])) for row in rows.values()]

    def sources_of(self, texts: Iterable[str]) -> dict[str, list[str]]:
        """Return for each text the sources of all passages that differ from it in nothing but whitespace."""
        words = {text: text.split() for text in texts}
        rows = {passage.text: row for row, passage in enumerate(self.passages) if passage.text in words}
        found: dict[str, list[str]] = {text: [] for text in words}
        similarity = self.embeddings @ self.embeddings[self._starts[[*rows.values()]]].T  # by their first windows
        for row, column in np.argwhere(similarity[self._starts] > ALMOST_EQUAL):
            text, passage = [*rows][column], self.passages[row]
            if passage.text.split() == words[text]:
                found[text].append(passage.source)
        return found

    def save(self, folder: Path) -> None:
        """Write to a folder, readable by its owner only; readers see the old index or the new one, whole.

        Only one process may save at a time.

        Raises:
            OSError: if it cannot be written; the old index stays.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        counted = zip(self.passages, self.windows.tolist(), strict=True)
        lines = "".join(json.dumps({"source": p.source, "text": p.text, "windows": n}) + "\n" for p, n in counted)
        token = secrets.token_hex(8)
        passages, embeddings = _data_files(folder, token)
        try:
            write_atomically(passages, lines)
            np.save(array := BytesIO(), self.embeddings, allow_pickle=False)
            write_atomically(embeddings, array.getvalue())
            metadata = json.dumps({"embedder": self.embedder, "files": token})
            write_atomically(folder / METADATA, metadata)
            self.metadata = metadata.encode()
        finally:
            _remove_unused(folder)

    def is_current(self, folder: Path) -> bool:
        """Return whether a folder still has this index; no other process has saved one since."""
        try:
            return (folder / METADATA).read_bytes() == self.metadata
        except OSError:
            return False

    @staticmethod
    def load(folder: Path, embedder: str | None = None) -> PassageIndex:
        """Read from a folder; only an embedder that the caller names may be loaded, since others may write there.

        Raises:
            QCFuseError: if there is no index, its files do not match, or it was made with another embedder.
        """
        try:
            try:
                index = _read(folder)
            except FileNotFoundError:  # another process may have saved meanwhile
                index = _read(folder)
        except FileNotFoundError as error:
            raise QCFuseError(f"there are no passages in {folder}; run `qcfuse warm run` on documents first") from error
        except (OSError, ValueError, TypeError, KeyError, AttributeError, EOFError, RecursionError) as error:
            raise QCFuseError(
                f"cannot read {folder} ({error}); remove that folder and run `qcfuse warm run`"
            ) from error
        if np.maximum(index.windows, 1).sum() != len(index.embeddings):
            raise QCFuseError(f"the files in {folder} do not match; remove that folder and run `qcfuse warm run`")
        if embedder is not None and index.embedder != embedder:
            raise QCFuseError(
                f"the passages in {folder} were embedded with {index.embedder!r}, not {embedder!r}; "
                + (
                    "leave out --embedder"
                    if index.embedder == DEFAULT_EMBEDDER
                    else "if you trust it, name it by --embedder"
                )
            )
        return index


def nearest(vectors: NDArray[np.float32], vector: NDArray[np.float32], count: int) -> list[int]:
    """Return the rows of the `count` vectors `[N, D]` nearest to a vector `[D]`, best first; all have length 1."""
    return [int(row) for row in np.argsort(-(vectors @ vector), kind="stable")[:count]]


def embedder_source(name: str) -> str:
    """Return the id or folder to load an embedding model from, given its name in an index."""
    return default_embedder() if name == DEFAULT_EMBEDDER else name


def _data_files(folder: Path, token: str) -> tuple[Path, Path]:
    if not re.fullmatch("[0-9a-f]+", token):
        raise ValueError(f"{METADATA} names other files than its own")
    return folder / f"passages-{token}.jsonl", folder / f"embeddings-{token}.npy"


def _read(folder: Path) -> PassageIndex:
    about = json.loads(metadata := (folder / METADATA).read_bytes())
    passages, embeddings = _data_files(folder, about["files"])
    lines = [json.loads(line) for line in passages.read_text("utf-8").splitlines()]
    windows, vectors = [line.pop("windows", 0) for line in lines], np.load(embeddings, allow_pickle=False)
    index = PassageIndex(about["embedder"], [IndexedPassage(**line) for line in lines], vectors, windows)
    index.metadata = metadata
    return index


def _remove_unused(folder: Path) -> None:
    with suppress(OSError, ValueError, KeyError):
        used = _data_files(folder, json.loads((folder / METADATA).read_text("utf-8"))["files"])
        for path in folder.iterdir():
            if DATA_FILE.fullmatch(path.name) and path not in used:
                path.unlink()


MAX_BYTES = 8 << 20
"""Size limit of the file, about 20,000 retrievals of ten passages; a larger file is cut to its last half."""


class RetrievalLog:
    """The last retrievals from the index in a folder, as hashes of the passages' texts.

    Lines are appended atomically, so several processes may write at once; unreadable lines are skipped. Only lines
    written while another process shortens the file may be lost.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOG_NAME

    def note(self, texts: Iterable[str]) -> None:
        """Append a retrieval; nothing happens if the folder cannot be written."""
        line = json.dumps([digest(text.encode()) for text in texts]) + "\n"
        with suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, line.encode())
                size = os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
            if size > MAX_BYTES:
                lines = self._path.read_text("utf-8", errors="replace")[-MAX_BYTES // 2 :].partition("\n")[2]
                write_atomically(self._path, lines, sync=False)

    def keep_only(self, texts: Iterable[str]) -> None:
        """Remove the hashes of all other passages, such as those of forgotten documents; `OSError` if it cannot."""
        kept, retrievals = {digest(text.encode()) for text in texts}, self._retrievals()
        if all(name in kept for retrieval in retrievals for name in retrieval):
            return
        lines = [[name for name in retrieval if name in kept] for retrieval in retrievals]
        write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in lines if line))

    def counts(self, texts: Iterable[str]) -> list[float]:
        """Return how often each passage was retrieved."""
        counts = Counter(name for retrieval in self._retrievals() for name in retrieval)
        return [float(counts[digest(text.encode())]) for text in texts]

    def retrievals(self, texts: Sequence[str]) -> list[list[int]]:
        """Return past retrievals as indices of these passages, without other passages."""
        indices: dict[str, int] = {}
        for index, text in enumerate(texts):
            indices.setdefault(digest(text.encode()), index)  # a passage of two documents has its first index
        return [[indices[name] for name in retrieval if name in indices] for retrieval in self._retrievals()]

    def _retrievals(self) -> list[list[str]]:
        try:
            lines = self._path.read_text("utf-8", errors="replace").splitlines()
        except OSError:
            return []
        retrievals = []
        for line in lines:
            try:
                retrieval = json.loads(line)
            except ValueError:
                continue
            if isinstance(retrieval, list) and all(isinstance(name, str) for name in retrieval):
                retrievals.append(retrieval)
        return retrievals


def forget_passages(folder: Path, source: str) -> int:
    """Remove a document from the index in a folder, if there is one, and from the log; return its passages' number."""
    if not folder.is_dir():
        return 0
    index = PassageIndex.load(folder)
    count = len(index.passages)
    index.remove({source})
    if len(index.passages) < count:
        index.save(folder)
    RetrievalLog(folder).keep_only(passage.text for passage in index.passages)
    return count - len(index.passages)
