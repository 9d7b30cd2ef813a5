"""Start loading what was retrieved."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict, Field

from langchain_qcfuse.chat_models import ChatQCFuse


class QCFusePrefetch(BaseDocumentCompressor):
    """Hands retrieved documents to the engine, which brings their caches into memory while later steps run.

    The documents pass through unchanged. Put it first in a `DocumentCompressorPipeline`: before a reranker, loading
    costs no time of its own.

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
        self.chat.engine.prefetch([document.page_content for document in documents])
        return documents
