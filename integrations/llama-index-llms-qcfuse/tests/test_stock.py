"""LlamaIndex's own engines with nothing changed but the LLM: warmed nodes are found in whatever prompts they make."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.default_prompts import DEFAULT_REFINE_PROMPT, DEFAULT_TEXT_QA_PROMPT
from llama_index.core.query_engine import CitationQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen.types import BaseQuestionGenerator, SubQuestion
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.tools import QueryEngineTool
from llama_index.core.vector_stores import SimpleVectorStore

from llama_index.llms.qcfuse import QCFuseLLM, QCFuseSynthesizer, QCFuseVectorStore, QCFuseWarmup
from qcfuse_rag.store.key import FRAMED
from tests.support.cases import cases
from tests.support.llama_index_documents import LetterEmbedding, hits
from tests.support.passages import PASSAGES, QUESTION

Reports = list[dict[str, Any]]


class TwoQuestions(BaseQuestionGenerator):
    """Asks the same of two tools, as a model of useful size might."""

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: dict[str, Any]) -> None:
        pass

    def generate(self, tools: Any, query: Any) -> list[SubQuestion]:
        return [SubQuestion(sub_question=str(query), tool_name=tool.name) for tool in tools]

    async def agenerate(self, tools: Any, query: Any) -> list[SubQuestion]:
        return self.generate(tools, query)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("compact", [3]),
        ("tree_summarize", [3]),
        ("simple_summarize", [3]),
        ("refine", [1, 1, 1]),
        ("compact_accumulate", [3]),
        ("accumulate", [1, 1, 1]),
    ],
)
@pytest.mark.parametrize("streaming", cases([False, True], False))
def test_every_synthesizer_reuses_every_retrieved_node(
    llm: QCFuseLLM, index: VectorStoreIndex, reports: Reports, mode: str, expected: list[int], streaming: bool
) -> None:
    if streaming and "accumulate" in mode:
        pytest.skip("LlamaIndex does not stream it")
    engine = index.as_query_engine(llm=llm, similarity_top_k=3, response_mode=mode, streaming=streaming)
    response = engine.query(QUESTION)
    assert len(response.source_nodes) == 3
    assert str(response)
    assert hits(reports) == expected


def test_an_answer_ends_where_the_default_wording_begins_again(llm: QCFuseLLM) -> None:
    """As a message and as a text; the wording that refines an answer has no question before its last line."""
    filled = {"context_str": PASSAGES[0], "query_str": QUESTION}
    messages = DEFAULT_TEXT_QA_PROMPT_SEL.format_messages(llm=llm, **filled)
    text = DEFAULT_TEXT_QA_PROMPT.format(**filled)
    refined = DEFAULT_REFINE_PROMPT.format(context_msg=PASSAGES[0], existing_answer="A boat.", query_str=QUESTION)
    requests = [llm._chat(messages, {}), llm._text(text, False, {}), llm._text(text, True, {})]
    assert {request(llm.engine)[0].turn_starts for request in requests} == {("\nQuery:", "\n\nQuery:")}
    assert llm._text(refined, False, {})(llm.engine)[0].turn_starts == ()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ContextChatEngine, CondensePlusContextChatEngine])
def test_chat_engines(llm: QCFuseLLM, index: VectorStoreIndex, reports: Reports, kind: Any) -> None:
    engine = kind.from_defaults(index.as_retriever(similarity_top_k=3), llm=llm)
    assert str(engine.chat(QUESTION))
    assert hits(reports) == [3]
    reports.clear()
    assert "".join(engine.stream_chat("And who has the key?").response_gen)
    assert hits(reports)[-1] == 3, "the earlier turn is before the nodes or after them, and they are found"


def test_a_sub_question_engine(llm: QCFuseLLM, index: VectorStoreIndex, reports: Reports) -> None:
    tools = [
        QueryEngineTool.from_defaults(index.as_query_engine(llm=llm, similarity_top_k=2), name=name, description=name)
        for name in ("harbour", "council")
    ]
    synthesizer = get_response_synthesizer(llm=llm)
    engine = SubQuestionQueryEngine(TwoQuestions(), synthesizer, tools, use_async=False, verbose=False)
    assert str(engine.query(QUESTION))
    assert hits(reports)[:2] == [2, 2]


def test_a_citation_engine(llm: QCFuseLLM, reports: Reports) -> None:
    """It shows the texts of nodes without their metadata, under headings of its own."""
    nodes = QCFuseWarmup(llm)([Document(text=text) for text in PASSAGES])
    index = VectorStoreIndex(nodes, embed_model=LetterEmbedding())
    engine = CitationQueryEngine.from_args(index, llm=llm, similarity_top_k=3, citation_chunk_size=512)
    assert str(engine.query(QUESTION))
    assert hits(reports) == [3]


@pytest.mark.parametrize("wrapped", [False, True])
def test_who_may_read_a_document_is_said_by_its_metadata(llm: QCFuseLLM, wrapped: bool) -> None:
    given = [
        Document(text=text, id_=f"{i}", metadata={"group": "" if i else "board"}) for i, text in enumerate(PASSAGES)
    ]
    for document in given:
        document.excluded_llm_metadata_keys = ["group"]
    if wrapped:
        for document in given:
            document.embedding = [1.0, 0.0]
        QCFuseVectorStore(SimpleVectorStore(), llm, access_key="group").add(given)
    else:
        QCFuseWarmup(llm, access_key="group")(given)
    engine = llm.engine
    readers = [
        engine.corpus.open_sources().readers(*engine.corpus.keys(engine.prompts.chunk_ids(text), (FRAMED,)))
        for text in PASSAGES
    ]
    assert readers == [{"board"}, {""}, {""}]


@pytest.mark.parametrize("streaming", [False, True])
def test_an_answer_over_separate_nodes_is_a_call_of_the_model_for_callbacks(llm: QCFuseLLM, streaming: bool) -> None:
    synthesizer, counter = QCFuseSynthesizer(llm, streaming=streaming), TokenCountingHandler(tokenizer=str.split)
    llm.callback_manager = CallbackManager([counter])
    response = synthesizer.get_response(QUESTION, PASSAGES)
    answer = "".join(response) if streaming else response
    assert answer == llm.engine.generate(llm.engine.prompt(QUESTION, PASSAGES), llm.sampling()).text
    [event] = counter.llm_token_counts
    assert event.prompt_token_count > len(" ".join(PASSAGES).split())
    assert event.completion_token_count > 0
