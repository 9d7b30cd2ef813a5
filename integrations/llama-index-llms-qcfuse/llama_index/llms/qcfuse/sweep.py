"""Mark and sweep: forget documents that are gone from LlamaIndex."""

from __future__ import annotations

from llama_index.core.storage.docstore import BaseDocumentStore

from llama_index.llms.qcfuse.base import QCFuseLLM
from qcfuse_rag import FusionEngine, QCFuseError


def forget_missing(llm: QCFuseLLM | FusionEngine, *docstores: BaseDocumentStore) -> list[str]:
    """Forget every document that none of the docstores has any more.

    For documents that were deleted where `QCFuseVectorStore` could not see it. Both kinds of docstore will do: that of
    an `IngestionPipeline`, which has the documents themselves, and that of an index, which has their nodes. An index
    takes a document out of its docstore only if told to: `index.delete_ref_doc(id, delete_from_docstore=True)`; one
    whose vector store holds the text has no nodes in its docstore, so give the pipeline's.

    Args:
        llm: whose store is swept, or its engine.
        *docstores: of everything that was warmed into the store; a document that none of them has goes, whoever warmed
            it.

    Returns:
        The documents forgotten.

    Raises:
        QCFuseError: if the docstores are empty, which would mean to forget everything and is more likely a mistake.
        StoreError: if the store cannot be written.
    """
    engine = llm.engine if isinstance(llm, QCFuseLLM) else llm
    sources = engine.sources.names()
    if sources and not any(docstore.get_all_document_hashes() for docstore in docstores):
        raise QCFuseError(
            "the docstore has no documents, so all would be forgotten; give the one that ingestion wrote, or, if all "
            "are to go, call `engine.forget(source)` for each of `engine.sources.names()`"
        )
    gone = [source for source in sources if not any(_has(docstore, source) for docstore in docstores)]
    for source in gone:
        engine.forget(source)
    return gone


def _has(docstore: BaseDocumentStore, source: str) -> bool:
    # One by one, not from get_all_document_hashes(): that is keyed by hash and has one of several equal documents.
    return (
        docstore.get_document_hash(source) is not None
        or docstore.ref_doc_exists(source)
        or docstore.document_exists(source)
    )
