"""Retrieve the passages of a library that are nearest to a question, each with its document's name, title and score."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import numpy as np

from qcfuse_rag.library.embedder import Embedder
from qcfuse_rag.library.index import DEFAULT_EMBEDDER, IndexedPassage, PassageIndex, RetrievalLog, embedder_source

HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]++(?=[^\n]*[^ \t\r#\n])([^\n]+)", re.MULTILINE)
"""Matches a Markdown heading, with spaces and signs at its end."""

TITLE_PASSAGES = 256
"""Passages before one in which its heading is sought."""

QUERY_CHARACTERS = 20_000
"""Characters of a question that are embedded; embedding models read some 500 tokens, but tokenise the whole text."""

SEARCHES = 3
"""Most searches for a question while documents change; after the last, what was forgotten is left out."""


@dataclass(frozen=True, slots=True)
class RetrievedPassage:
    """A passage retrieved for a question."""

    source: str  # name of its document
    title: str | None  # the Markdown heading that it stands under; None if its document has no heading up to its end
    text: str
    score: float  # cosine similarity to the question, at most 1


class Retriever:
    """Retrieve passages from the index in a folder, by its embedding model.

    What is retrieved is noted in the folder's log, the question is not.
    """

    def __init__(self, folder: Path, index: PassageIndex, embed: Embedder) -> None:
        self._folder, self._index, self._embed, self._log = folder, index, embed, RetrievalLog(folder)
        self._embedding = threading.Lock()  # tokenizers cannot be used by two threads at once

    @staticmethod
    def open(folder: Path, embedder: str = DEFAULT_EMBEDDER) -> Retriever:
        """Open the index in a folder, made with the embedding model of this name; for errors see both classes."""
        return Retriever(folder, PassageIndex.load(folder, embedder), Embedder(embedder_source(embedder)))

    @property
    def index(self) -> PassageIndex:
        """The passages as they are in the folder now: another process may have changed or forgotten documents."""
        if not self._index.is_current(self._folder):
            self._index = PassageIndex.load(self._folder, self._index.embedder)
        return self._index

    def retrieve(self, question: str, count: int, *, after: str | None = None) -> list[RetrievedPassage]:
        """Return the `count` passages nearest to a question, best first.

        A follow-up such as "and for how long?" may not say what it is about. So the search uses both the question and
        the question after the earlier one, `after`; a passage counts by the nearer of the two.
        """
        queries = [question] if after is None else [question, f"{after} {question}"]
        with self._embedding:
            vectors = np.concatenate(self._embed.windows([query[:QUERY_CHARACTERS] for query in queries]))
        for _ in range(SEARCHES):
            index = self.index
            found, passages = index.search(vectors, count), index.passages
            self._log.note(passages[row].text for row, _ in found)
            if self.index is index:
                break
            with suppress(OSError):  # what was found and noted may be forgotten
                self._log.keep_only(passage.text for passage in self.index.passages)
        else:
            kept = set(self.index.passages)
            found = [(row, score) for row, score in found if passages[row] in kept]
        return [
            RetrievedPassage(passages[row].source, _title(passages, row), passages[row].text, score)
            for row, score in found
        ]

    def short_names(self, passages: Iterable[IndexedPassage | RetrievedPassage]) -> list[str]:
        """Return the name of each passage's document for people: without the folder that the library's files share."""
        every = (*self.index.passages, *(passages := list(passages)))  # what was retrieved may be forgotten by now
        paths = {path for source in {p.source for p in every} if (path := PurePath(source)).is_absolute()}
        shared = os.path.commonpath(path.parent for path in paths) if paths else ""
        return [
            str(path.relative_to(shared)) if (path := PurePath(passage.source)) in paths else passage.source
            for passage in passages
        ]

    def places(self, passages: Sequence[RetrievedPassage]) -> list[str]:
        """Return for people where retrieved passages stand: the document, and its page or heading."""
        names = zip(self.short_names(passages), passages, strict=True)
        return [f"{name} ({passage.title})" if passage.title else name for name, passage in names]

    def with_copies(self, passages: Sequence[RetrievedPassage]) -> list[RetrievedPassage]:
        """Return each passage once for every document that has it; only the one it was found in has a title."""
        sources = self.index.sources_of(passage.text for passage in passages)
        return [
            replace(passage, source=source, title=passage.title if source == passage.source else None)
            for passage in passages
            for source in dict.fromkeys([passage.source, *sources[passage.text]])
        ]


def _title(passages: Sequence[IndexedPassage], row: int) -> str | None:
    """Return the first heading of a passage, or the last heading before it in its document."""
    headings, first = HEADING.findall(passages[row].text)[:1], max(0, row - TITLE_PASSAGES)
    # The passages of a document are next to each other, in order.
    while not headings and row > first and passages[row - 1].source == passages[row].source:
        row -= 1
        headings = HEADING.findall(passages[row].text)
    return headings[-1].rstrip(" \t#\r") if headings else None
