"""What a node is to the store: a passage, and the document it is from."""

from __future__ import annotations

from collections.abc import Iterable

from llama_index.core.schema import BaseNode, MetadataMode

from qcfuse_rag.store.documents.acl import tags_of


def passage_of(node: BaseNode) -> str:
    """Return a node's text as the model is shown it, hence as it is stored."""
    return node.get_content(metadata_mode=MetadataMode.LLM)


def source_of(node: BaseNode) -> str:
    """Return the id by which LlamaIndex deletes the node's document; a node that was not split is its own."""
    return node.ref_doc_id or node.node_id


def access_of(nodes: Iterable[BaseNode], key: str | None) -> dict[str, str | None] | None:
    """Return who may read each document by a metadata key of its nodes; see `qcfuse_rag.tags_of`."""
    return tags_of(((source_of(node), node.metadata) for node in nodes), key)
