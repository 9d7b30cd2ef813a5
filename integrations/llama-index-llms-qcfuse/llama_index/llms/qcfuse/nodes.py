"""What a node is to the store: a passage, and the document it is from."""

from __future__ import annotations

from collections.abc import Iterable

from llama_index.core.schema import BaseNode, MetadataMode


def passage_of(node: BaseNode) -> str:
    """Return a node's text as the model is shown it, hence as it is stored."""
    return node.get_content(metadata_mode=MetadataMode.LLM)


def source_of(node: BaseNode) -> str:
    """Return the id by which LlamaIndex deletes the node's document; a node that was not split is its own."""
    return node.ref_doc_id or node.node_id


def access_of(nodes: Iterable[BaseNode], key: str | None) -> dict[str, str | None] | None:
    """Return who may read each document by a metadata key of its nodes; None if no key is given.

    A document whose nodes do not have the key may be read by everybody.
    """
    if key is None:
        return None
    tags = ((source_of(node), node.metadata.get(key)) for node in nodes)
    return {source: None if tag in (None, "") else str(tag) for source, tag in tags}
