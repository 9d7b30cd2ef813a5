"""The documents of a library: a warming job brings its index up to date; a server adds and removes single ones."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import Closed, QCFuseError, StoreError
from qcfuse_rag.ingestion.warm_job import Progress
from qcfuse_rag.library.index import PassageIndex, forget_passages
from qcfuse_rag.library.readers import TextSplitting, is_markdown
from qcfuse_rag.library.retriever import QUERY_CHARACTERS, RetrievedPassage, Retriever

Embed = Callable[[Sequence[str]], list[NDArray[np.float32]]]
"""Turns each text into the `[W, D]` vectors of its windows, see `Embedder.windows`."""

INDEX_SAVE_INTERVAL_S = 30.0
PASSAGE_TOKENS = 384
EMBEDDED_AT_ONCE = 8
"""Texts of a client to embed before a question of another client may be retrieved for."""

BATCH_TOKENS = 512
"""Tokens to warm between two looks whether requests wait."""


def vanished_files(index: PassageIndex, paths: Iterable[Path], passages: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the sources to forget: indexed files that no longer exist in the folders, and documents without text.

    A source just read is kept: a JSON lines record may have the name of a file elsewhere.
    """
    folders = [path.resolve() for path in paths if path.is_dir()]
    sources = {passage.source for passage in index.passages}
    deleted = {
        source for source in sources if any(map(Path(source).is_relative_to, folders)) and not os.path.isfile(source)
    }
    return (deleted | passages.keys()) - {source for source, texts in passages.items() if texts}


def index_passages(
    index: PassageIndex,
    folder: Path,
    passages: Mapping[str, list[str]],
    embed: Embed,
    *,
    at_once: int,
    progress: Progress,
) -> None:
    """Embed the passages of new, changed and outdated documents, and save the index at intervals and at the end.

    At least `at_once` passages are embedded together.
    """
    indexed, outdated = index.by_source(), index.outdated
    changed = outdated | {source: texts for source, texts in passages.items() if indexed.get(source) != texts}
    saved_at = time.monotonic()
    done, total = 0, sum(map(len, changed.values()))
    while changed:
        batch: dict[str, list[str]] = {}
        while changed and sum(map(len, batch.values())) < at_once:
            source = next(iter(changed))
            batch[source] = changed.pop(source)
        index.replace(batch, embed([text for texts in batch.values() for text in texts]))
        done += sum(map(len, batch.values()))
        progress(done, total)
        if time.monotonic() - saved_at > INDEX_SAVE_INTERVAL_S:
            index.save(folder)
            saved_at = time.monotonic()
    index.save(folder)


class ServedLibrary(Retriever):
    """Retrieves for one request at a time; documents change one job at a time.

    Args:
        opened: the passages, which this takes over.
        engine: warms and forgets caches.
        count: number of passages to retrieve for a question.
        editable: whether clients may add and remove documents.
        changing: returns a context in which no other job changes the library; raises `Busy` if another job does.
    """

    def __init__(
        self,
        opened: Retriever,
        engine: FusionEngine,
        *,
        count: int = 6,
        editable: bool = True,
        changing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(opened._folder, opened._index, opened._embed)
        self.editable = editable
        self._engine, self._count = engine, count
        self._changing, self._closed = changing, threading.Event()
        # Called with the name of each document that was removed; they may return a number of passages that waited.
        self.forget_listeners: list[Callable[[str], int | None]] = []
        self._splitting = TextSplitting(engine.lm.tokenizer, PASSAGE_TOKENS) if editable else None

    def retrieve_for(self, question: str, after: str | None) -> list[RetrievedPassage]:
        """Return the passages nearest to a question after an earlier one, if there is one; see `retrieve`."""
        return self.retrieve(question, self._count, after=after)

    def embed(self, texts: Sequence[str], stopped: Callable[[], bool]) -> tuple[NDArray[np.float32], int]:
        """Embed the beginnings of texts for a client.

        Returns:
            `[N, D]` vectors of length 1, of the first `N` texts if it was stopped, and the number of tokens read.
        """
        vectors: list[NDArray[np.float32]] = []
        tokens = 0
        for batch in self._in_turns([text[:QUERY_CHARACTERS] for text in texts], stopped):
            vectors.append(self._embed(batch))
            tokens += self._embed.count_tokens(batch)
        return np.concatenate(vectors) if vectors else np.zeros((0, 0), np.float32), tokens

    def _in_turns(self, texts: Sequence[str], stopped: Callable[[], bool]) -> Iterator[Sequence[str]]:
        """Yield texts to embed, some at a time, until it is stopped; questions are retrieved for in between."""
        for start in range(0, len(texts), EMBEDDED_AT_ONCE):
            if stopped():
                return
            with self._embedding:
                yield texts[start : start + EMBEDDED_AT_ONCE]
            time.sleep(0.001)  # or this thread would have the lock again before another one wakes up

    def documents(self) -> list[dict[str, Any]]:
        """Return each document's source, its short name for people, and its number of passages, by name."""
        passages = self.index.passages  # a job replaces the index
        first_of_each = {passage.source: passage for passage in reversed(passages)}
        counts = Counter(passage.source for passage in passages)
        names = self.short_names(first_of_each.values())
        listed = [
            {"source": source, "name": name, "passages": counts[source]}
            for source, name in zip(first_of_each, names, strict=True)
        ]
        return sorted(listed, key=lambda document: str(document["name"]))

    def has(self, text: str, source: str) -> bool:
        """Return whether a document has a passage."""
        return any(passage.source == source and passage.text == text for passage in self.index.passages)

    def add(self, documents: Mapping[str, str], progress: Progress) -> dict[str, Any]:
        """Split documents into passages, index and warm them; a document of the same name is replaced.

        The text is by source, or by the short name of a document that is there. Returns the numbers of documents and
        passages, and what was warmed, as JSON-compatible data.

        Raises:
            Busy: if another job changes the library.
            Closed: if it is closed meanwhile.
            StoreError: if the store or the library cannot be written.
            QCFuseError: if a document has no text, or the library's caches are derived from other passages.
        """
        if any(base.derived for base in self._engine.corpus.bases):
            raise QCFuseError("caches of this library are made with their neighbours; use `qcfuse warm run` here")
        documents = dict(zip(self._sources_of(documents), documents.values(), strict=True))
        assert self._splitting is not None
        passages = {name: self._splitting.split(text, markdown=is_markdown(name)) for name, text in documents.items()}
        if empty := [name for name, texts in passages.items() if not texts]:
            raise QCFuseError(f"{empty[0]} has no text")
        texts = [text for document in passages.values() for text in document]

        def advance(done: int, total: int) -> None:
            self._require_open()
            progress(done, total)

        with self._changing():
            vectors = [v for batch in self._in_turns(texts, self._closed.is_set) for v in self._embed.windows(batch)]
            self._require_open()
            index = PassageIndex.load(self._folder, self._index.embedder)
            index.replace(passages, vectors)
            with _writing():
                index.save(self._folder)
                self._index = index
                self._log.keep_only(passage.text for passage in index.passages)
            summary = self._engine.warm(
                texts,
                sources=[name for name, document in passages.items() for _ in document],
                batch_tokens=BATCH_TOKENS,
                progress=advance,
            )
        return {"documents": len(passages), "passages": len(texts), **summary.to_dict()}

    def forget(self, source: str) -> dict[str, int]:
        """Remove a document by its source or short name, also what waits to be warmed; return the numbers removed.

        Raises:
            Busy: if another job changes the library.
            StoreError: if the store or the library cannot be written.
        """
        with self._changing():
            [source] = self._sources_of([source])
            caches = self._engine.forget(source)
            try:
                with _writing():
                    passages = forget_passages(self._folder, source)
                if passages:  # a request may have brought back what it found in the old index
                    caches += self._engine.forget(source)
            finally:
                waiting = sum(listener(source) or 0 for listener in self.forget_listeners)
        return {"caches": caches, "passages": passages, "waiting": waiting}

    def close(self) -> None:
        """End adding documents at the next batch; what is warm by then stays."""
        self._closed.set()

    def _require_open(self) -> None:
        if self._closed.is_set():
            raise Closed("the server ends")

    def _sources_of(self, names: Iterable[str]) -> list[str]:
        """Return the source of each document with a short name, if there is one and no source has this name itself."""
        sources: dict[str, list[str]] = {}
        for document in self.documents():
            sources.setdefault(document["name"], []).append(document["source"])
        known = {source for found in sources.values() for source in found}
        return [name if name in known or len(sources.get(name, ())) != 1 else sources[name][0] for name in names]


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"the library cannot be written: {error.strerror}") from error
