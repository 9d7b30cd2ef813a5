"""Sentence windows: what is warmed is what `MetadataReplacementPostProcessor` shows to the model."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.node_parser import SentenceWindowNodeParser
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores import SimpleVectorStore

from llama_index.llms.qcfuse import QCFuseLLM, QCFuseVectorStore, QCFuseWarmup
from tests.support.llama_index_documents import EMBED
from tests.support.passages import PASSAGES, QUESTION


def windows() -> list[BaseNode]:
    parser = SentenceWindowNodeParser(window_size=1)
    return parser.get_nodes_from_documents([Document(text=" ".join(PASSAGES), id_="a")])


def count_stored(llm: QCFuseLLM, nodes: list[BaseNode]) -> int:
    """Return how many windows have caches; with their metadata they are shown as they are."""
    chunks = [llm.engine.prompts.chunk_ids(node.metadata["window"]) for node in nodes]
    return llm.engine.corpus.warm_job(chunks).plan().present


def test_the_windows_are_warmed_and_found_in_the_prompt(llm: QCFuseLLM, reports: list[dict[str, Any]]) -> None:
    nodes = windows()
    QCFuseWarmup(llm, target_metadata_key="window")(nodes)
    assert count_stored(llm, nodes) == len(nodes)
    index = VectorStoreIndex(nodes, embed_model=EMBED)
    show_window = MetadataReplacementPostProcessor(target_metadata_key="window")
    index.as_query_engine(llm=llm, similarity_top_k=1, node_postprocessors=[show_window]).query(QUESTION)
    assert reports[-1]["reused_tokens"] > 0


def test_a_vector_store_warms_windows_too_and_forgets_them(llm: QCFuseLLM) -> None:
    vectors = QCFuseVectorStore(SimpleVectorStore(), llm, target_metadata_key="window")
    nodes, context = windows(), StorageContext.from_defaults(vector_store=vectors)
    index = VectorStoreIndex(nodes, storage_context=context, embed_model=EMBED)
    assert count_stored(llm, nodes) == len(nodes)
    index.delete_ref_doc("a")
    assert count_stored(llm, nodes) == 0


def test_windows_that_are_not_warmed_are_told(llm: QCFuseLLM) -> None:
    with pytest.warns(UserWarning, match="give target_metadata_key='window'"):
        QCFuseWarmup(llm)(windows())


@pytest.mark.parametrize("shown", [True, None])
def test_warming_shows_its_progress_in_a_terminal_or_when_asked(
    llm: QCFuseLLM, capsys: pytest.CaptureFixture[str], shown: bool | None
) -> None:
    QCFuseWarmup(llm, target_metadata_key="window", show_progress=shown)(windows())
    assert ("warming passages: 100%" in capsys.readouterr().err) == (shown is True), "this is no terminal"
