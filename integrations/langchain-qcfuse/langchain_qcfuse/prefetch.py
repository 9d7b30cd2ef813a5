"""Start loading the caches of retrieved documents."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict, Field

from langchain_qcfuse.chat_models import ChatQCFuse


class QCFusePrefetch(BaseDocumentCompressor):
    """Loads the caches of retrieved documents into memory while later steps run.

    The documents pass through unchanged. Put it first in a `DocumentCompressorPipeline`: in front of a reranker,
    loading costs no extra time.

    Example:
        ```python
        retriever = ContextualCompressionRetriever(base_compressor=QCFusePrefetch(chat=chat), base_retriever=retriever)
        ```
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    chat: ChatQCFuse = Field(description="The chat model that will answer.", exclude=True)

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Start loading the documents' caches, and return the documents."""
        self.chat.engine.corpus.prefetch([document.page_content for document in documents])
        return documents
