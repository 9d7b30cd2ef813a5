"""Order retrieved documents by their stored caches."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict, Field

from langchain_qcfuse.chat_models import ChatQCFuse


class QCFuseRerank(BaseDocumentCompressor):
    """Keeps the documents behind which the model finds the question likeliest, best first; see `FusionEngine.rerank`.

    It reads the caches that the answer reads, so let the retriever return several times `top_n` documents. Of a warmed
    document only the question is computed; of other documents all is. The logger `qcfuse_rag` says what was reused. The
    score that orders is the documents' metadata `relevance_score`.

    Example:
        ```python
        retriever = ContextualCompressionRetriever(base_compressor=QCFuseRerank(chat=chat), base_retriever=retriever)
        ```
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    chat: ChatQCFuse = Field(description="The chat model that will answer.", exclude=True)
    top_n: int = Field(default=3, description="Number of documents to keep.", gt=0)
    score_key: str | None = Field(
        default="score",
        description="Metadata key of the retriever's score, which counts as much as the likelihood; if a document has "
        "none, the order of the documents does. None: likelihoods alone order.",
    )

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Return copies of the best documents, best first."""
        found = self.chat.engine.rerank(
            query,
            [document.page_content for document in documents],
            self.top_n,
            retrieved=None
            if self.score_key is None
            else [document.metadata.get(self.score_key) for document in documents],
        )
        return [
            documents[index].model_copy(
                update={"metadata": {**documents[index].metadata, "relevance_score": found.scores[index]}}
            )
            for index in found.order
        ]
