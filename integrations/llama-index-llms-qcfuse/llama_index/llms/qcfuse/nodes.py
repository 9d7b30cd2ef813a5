"""LlamaIndex's nodes as passages of the store."""

from __future__ import annotations

from collections.abc import Iterable

from llama_index.core.schema import BaseNode, MetadataMode

from qcfuse_rag.integrations import Passage, warn_caller

WINDOW_KEY = "window"
"""The metadata key under which `SentenceWindowNodeParser` puts a window by default."""


def text_of(node: BaseNode, target_metadata_key: str | None = None) -> str:
    """Return a node's text as the model is shown it, and therefore as it is stored.

    Args:
        node: the node.
        target_metadata_key: key of the text that `MetadataReplacementPostProcessor` will put in place of the node's
            own, if the node has it; None: the node is shown as it is.
    """
    if target_metadata_key in node.metadata:
        node = node.model_copy()
        node.set_content(node.metadata[target_metadata_key])
    return node.get_content(metadata_mode=MetadataMode.LLM)


def source_of(node: BaseNode) -> str:
    """Return the id by which LlamaIndex deletes the node's document; an unsplit node is its own document."""
    return node.ref_doc_id or node.node_id


def passage_of(node: BaseNode, target_metadata_key: str | None = None) -> Passage:
    """Return a node as a passage; see `text_of`."""
    return Passage(text_of(node, target_metadata_key), source_of(node), node.metadata)


def warn_of_windows(nodes: Iterable[BaseNode], target_metadata_key: str | None) -> None:
    """Warn at the caller's line if nodes carry windows that the model will be shown and that are not warmed."""
    if target_metadata_key is None and any(
        WINDOW_KEY in node.metadata and WINDOW_KEY in node.excluded_llm_metadata_keys for node in nodes
    ):
        warn_caller(
            "sentences are warmed, not the windows around them: if MetadataReplacementPostProcessor puts the windows "
            f"in their place, give target_metadata_key={WINDOW_KEY!r} here too"
        )
