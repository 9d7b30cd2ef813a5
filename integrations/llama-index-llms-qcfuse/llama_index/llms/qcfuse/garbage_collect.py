"""Garbage collection: forget documents that LlamaIndex no longer has."""

from __future__ import annotations

from llama_index.core.storage.docstore import BaseDocumentStore

from llama_index.llms.qcfuse.base import QCFuseLLM
from qcfuse_rag import FusionEngine, QCFuseError


def forget_missing(llm: QCFuseLLM | FusionEngine, *docstores: BaseDocumentStore) -> list[str]:
    """Forget every document that none of the docstores has any more.

    For documents that were deleted without `QCFuseVectorStore`. Two kinds of docstore work: an `IngestionPipeline`'s,
    which has the documents themselves, and an index's, which has their nodes. An index removes a document from its
    docstore only with `index.delete_ref_doc(id, delete_from_docstore=True)`. If its vector store holds the text, its
    docstore has no nodes: give the pipeline's docstore instead.

    Args:
        llm: the LLM or its engine.
        *docstores: docstores of everything that was warmed into the store. A document that none of them has is
            forgotten, no matter how it was warmed.

    Returns:
        The ids of the forgotten documents.

    Raises:
        QCFuseError: if the docstores are empty: everything would be forgotten, which is more likely a mistake.
        StoreError: if the store cannot be written.
    """
    engine = llm.engine if isinstance(llm, QCFuseLLM) else llm
    sources = engine.corpus.open_sources().names()
    if sources and not any(docstore.get_all_document_hashes() for docstore in docstores):
        raise QCFuseError(
            "the docstore has no documents, so all would be forgotten; give the docstore that ingestion wrote, or, to "
            "forget all, call `engine.forget(source)` for each of `engine.corpus.open_sources().names()`"
        )
    missing = [source for source in sources if not any(_has(docstore, source) for docstore in docstores)]
    for source in missing:
        engine.forget(source)
    return missing


def _has(docstore: BaseDocumentStore, source: str) -> bool:
    # Not get_all_document_hashes(): its keys are hashes, so it has only one of several equal documents.
    return (
        docstore.get_document_hash(source) is not None
        or docstore.ref_doc_exists(source)
        or docstore.document_exists(source)
    )
