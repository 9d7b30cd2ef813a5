"""LlamaIndex's nodes as passages of the store."""

from __future__ import annotations

from llama_index.core.schema import BaseNode, MetadataMode

from qcfuse_rag.integrations import Passage


def text_of(node: BaseNode) -> str:
    """Return a node's text as the model is shown it, and therefore as it is stored."""
    return node.get_content(metadata_mode=MetadataMode.LLM)


def source_of(node: BaseNode) -> str:
    """Return the id by which LlamaIndex deletes the node's document; an unsplit node is its own document."""
    return node.ref_doc_id or node.node_id


def passage_of(node: BaseNode) -> Passage:
    """Return a node as a passage."""
    return Passage(text_of(node), source_of(node), node.metadata)
