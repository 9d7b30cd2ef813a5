"""What the tests of the LangChain integration retrieve from: documents and embeddings."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding

EMBED = DeterministicFakeEmbedding(size=4)


def documents(**texts: Sequence[str]) -> list[Document]:
    """Return the pieces of each source."""
    return [Document(text, metadata={"source": source}) for source, pieces in texts.items() for text in pieces]
