"""Read the passages of an existing index, to warm them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from llama_index.core.data_structs.data_structs import IndexDict
from llama_index.core.schema import BaseNode, Document
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.storage.index_store import SimpleIndexStore

from llama_index.llms.qcfuse.nodes import source_of, text_of
from qcfuse_rag import QCFuseError


def read_index(persist_dir: str | Path) -> Iterator[tuple[str, str]]:
    """Read the passages of a persisted index, without its vectors and without an embedding model.

    A vector index is read by its own list of nodes, because its docstore may still have deleted nodes. Other kinds of
    index are read from the docstore, without documents that were split into nodes.

    Args:
        persist_dir: folder that `index.storage_context.persist` wrote.

    Returns:
        For every node its document's id and its text as the model is shown it, `get_content(MetadataMode.LLM)`.

    Raises:
        QCFuseError: if there is no index, or it has no nodes.
    """
    try:
        nodes = SimpleDocumentStore.from_persist_dir(str(persist_dir)).docs
        structs = SimpleIndexStore.from_persist_dir(str(persist_dir)).index_structs()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise QCFuseError(
            f"no LlamaIndex index in {persist_dir} ({error}); give the folder that "
            "`index.storage_context.persist(folder)` wrote, not an ingestion pipeline's"
        ) from error
    if structs and all(isinstance(struct, IndexDict) for struct in structs):
        listed = dict.fromkeys(node for struct in structs for node in struct.nodes_dict.values())
        chosen = [nodes[node] for node in listed if node in nodes]
    else:
        chosen = unsplit(nodes)
    if not chosen:
        raise QCFuseError(
            f"the LlamaIndex index in {persist_dir} has no nodes; if its vector store holds the text, pass the nodes "
            "that its `get_nodes()` returns through `QCFuseWarmup(llm)`"
        )
    return ((source_of(node), text_of(node)) for node in chosen)


def unsplit(nodes: dict[str, BaseNode]) -> list[BaseNode]:
    """Return all nodes except documents whose parts are among them."""
    split = {node.ref_doc_id for node in nodes.values()}
    return [node for node in nodes.values() if not (isinstance(node, Document) and node.node_id in split)]
