"""What a node is to the store: a passage, and the document it is from."""

from __future__ import annotations

from llama_index.core.schema import BaseNode, MetadataMode


def passage_of(node: BaseNode) -> str:
    """Return a node's text as the model is shown it, hence as it is stored."""
    return node.get_content(metadata_mode=MetadataMode.LLM)


def source_of(node: BaseNode) -> str:
    """Return the id by which LlamaIndex deletes the node's document; a node that was not split is its own."""
    return node.ref_doc_id or node.node_id
