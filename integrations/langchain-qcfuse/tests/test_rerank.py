"""Documents reranked from their stored caches, in LangChain's own retrievers and chains."""

from __future__ import annotations

import logging

import pytest
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.documents import Document
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_qcfuse import ChatQCFuse, QCFuseRerank, create_qcfuse_chain
from tests.support.langchain_documents import EMBED
from tests.support.passages import PASSAGES, QUESTION

TEXTS = [*PASSAGES, *(f"On day {day} the council counts the boats; the mill is closed." for day in range(3))]
DOCUMENTS = [Document(text, metadata={"source": "reports"}) for text in TEXTS]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_chain_answers_over_the_best_three_of_six(
    chat: ChatQCFuse, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    chat.warm(DOCUMENTS)
    base = InMemoryVectorStore.from_documents(DOCUMENTS, EMBED).as_retriever(search_kwargs={"k": 6})
    best = ContextualCompressionRetriever(base_compressor=QCFuseRerank(chat=chat, top_n=3), base_retriever=base)
    found = RunnablePassthrough.assign(context=(lambda inputs: inputs["input"]) | best)
    chain = found.assign(answer=create_qcfuse_chain(chat))
    entries = chat.engine.store.stats()[0].entries
    with caplog.at_level(logging.INFO, "qcfuse_rag"):
        result = await chain.ainvoke({"input": QUESTION}) if asynchronous else chain.invoke({"input": QUESTION})
    texts = [document.page_content for document in base.invoke(QUESTION)]
    expected = chat.engine.rerank(QUESTION, texts, 3, retrieved=[None] * 6)
    context = result["context"]
    assert [document.page_content for document in context] == [texts[index] for index in expected.order]
    assert [document.metadata for document in context] == [
        {"source": "reports", "relevance_score": pytest.approx(expected.scores[index])} for index in expected.order
    ]
    assert "reranked: 6 of 6 passages reused" in caplog.text
    message = chat.invoke(QUESTION, documents=context)
    assert message.content == result["answer"]
    assert message.response_metadata["fusion"]["fallback"] is None
    assert chat.engine.store.stats()[0].entries == entries, "nothing is warmed again, under no other key"


def test_scores_in_metadata_count_unless_they_are_left_out(chat: ChatQCFuse) -> None:
    chat.warm(DOCUMENTS)
    alone = chat.engine.rerank(QUESTION, TEXTS)
    liked = [float(index == alone.order[-1]) for index in range(6)]
    scored = [Document(text, metadata={"score": score, "other": 0.5}) for text, score in zip(TEXTS, liked, strict=True)]

    def order(**options: str | None) -> list[str]:
        best = QCFuseRerank(chat=chat, top_n=6, **options).compress_documents(scored, QUESTION)
        return [document.page_content for document in best]

    both = chat.engine.rerank(QUESTION, TEXTS, retrieved=liked)
    assert order() == [TEXTS[index] for index in both.order]
    assert order(score_key=None) == order(score_key="other") == [TEXTS[index] for index in alone.order]
    assert both.order != alone.order
    assert all("relevance_score" not in document.metadata for document in scored), "documents are copied"
