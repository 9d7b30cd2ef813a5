"""Nodes reranked from their stored caches, in LlamaIndex's own query engines."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.schema import NodeWithScore, TextNode

from llama_index.llms.qcfuse import QCFuseLLM, QCFuseRerank, QCFuseWarmup
from tests.support.llama_index_documents import LetterEmbedding
from tests.support.passages import PASSAGES, QUESTION

TEXTS = [*PASSAGES, *(f"On day {day} the council counts the boats; the mill is closed." for day in range(3))]


@pytest.fixture
def nodes(llm: QCFuseLLM) -> list[Document]:
    documents = [Document(text=text, metadata={"page": number}) for number, text in enumerate(TEXTS)]
    QCFuseWarmup(llm)(documents)
    return documents


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_query_engine_answers_over_the_best_three_of_six(
    llm: QCFuseLLM,
    nodes: list[Document],
    reports: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
    asynchronous: bool,
) -> None:
    rerank = QCFuseRerank(llm=llm, top_n=3)
    index = VectorStoreIndex(nodes, embed_model=LetterEmbedding())
    queries = index.as_query_engine(llm=llm, similarity_top_k=6, node_postprocessors=[rerank])
    entries = llm.engine.store.stats()[0].entries
    with caplog.at_level(logging.INFO, "qcfuse_rag"):
        response = await queries.aquery(QUESTION) if asynchronous else queries.query(QUESTION)
    retrieved = index.as_retriever(similarity_top_k=6).retrieve(QUESTION)
    texts, scores = [node.node.get_content("llm") for node in retrieved], [node.score for node in retrieved]
    expected = llm.engine.rerank(QUESTION, texts, 3, retrieved=scores)
    assert [node.node.get_content("llm") for node in response.source_nodes] == [texts[i] for i in expected.order]
    assert [node.score for node in response.source_nodes] == pytest.approx([expected.scores[i] for i in expected.order])
    assert "reranked: 6 of 6 passages reused" in caplog.text
    [report] = reports
    assert [lookup["hit"] for lookup in report["lookups"] if lookup["role"] == "chunk"] == [True] * 3
    assert report["fallback"] is None
    assert llm.engine.store.stats()[0].entries == entries, "nothing is warmed again, under no other key"


@pytest.mark.parametrize("score", [None, 0.5])
def test_the_retrievers_scores_count_unless_they_are_left_out(
    llm: QCFuseLLM, nodes: list[Document], score: float | None
) -> None:
    """Without a score the order counts; equal scores leave the likelihoods to order."""
    found = [NodeWithScore(node=node, score=score) for node in nodes]
    texts = [node.get_content("llm") for node in nodes]

    def order(**options: Any) -> list[str]:
        best = QCFuseRerank(llm=llm, top_n=6, **options).postprocess_nodes(found, query_str=QUESTION)
        return [node.node.get_content("llm") for node in best]

    alone = [texts[index] for index in llm.engine.rerank(QUESTION, texts).order]
    both = [texts[index] for index in llm.engine.rerank(QUESTION, texts, retrieved=[score] * 6).order]
    assert order() == both
    assert order(add_retrieved=False) == alone
    assert (both == alone) == (score is not None)


def test_windows_are_ordered_by_the_text_that_was_warmed(llm: QCFuseLLM, caplog: pytest.LogCaptureFixture) -> None:
    nodes = [
        TextNode(text="A sentence.", metadata={"window": text}, excluded_llm_metadata_keys=["window"]) for text in TEXTS
    ]
    QCFuseWarmup(llm, target_metadata_key="window")(nodes)
    rerank = QCFuseRerank(llm=llm, top_n=1, target_metadata_key="window")
    with caplog.at_level(logging.INFO, "qcfuse_rag"):
        [best] = rerank.postprocess_nodes([NodeWithScore(node=node, score=1.0) for node in nodes], query_str=QUESTION)
    assert best.node.metadata["window"] == TEXTS[llm.engine.rerank(QUESTION, TEXTS).order[0]]
    assert "6 of 6 passages reused" in caplog.text


def test_no_nodes_are_no_nodes_and_no_question_is_an_error(llm: QCFuseLLM, nodes: list[Document]) -> None:
    rerank = QCFuseRerank(llm=llm)
    assert rerank.postprocess_nodes([], query_str=QUESTION) == []
    with pytest.raises(ValueError, match="give query_str"):
        rerank.postprocess_nodes([NodeWithScore(node=nodes[0])])
