"""In place of ChatHuggingFace, on a real model: every document reused, and recomputing all rows the same answers."""

from __future__ import annotations

from typing import Any

from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from langchain_qcfuse import ChatQCFuse
from qcfuse_rag.bundled import corpus, default_embedder
from tests.support.smollm2 import TAKES_MINUTES, smollm2_questions

pytestmark = TAKES_MINUTES
COUNT = 30
PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer the question from the context, as short as you can.\n\n{context}"), ("human", "{input}")]
)


def test_the_same_answers_as_chat_huggingface_and_every_document_reused(smollm2_folder: str) -> None:
    # Takes seconds, which no other test should wait for.
    from langchain_huggingface import ChatHuggingFace, HuggingFaceEmbeddings, HuggingFacePipeline

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    generate = pipeline(
        "text-generation",
        model=AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype="float32"),
        tokenizer=tokenizer,
        max_new_tokens=16,
        do_sample=False,
        return_full_text=False,
    )
    theirs = ChatHuggingFace(llm=HuggingFacePipeline(pipeline=generate), tokenizer=tokenizer)
    ours = ChatQCFuse(model=smollm2_folder, device="cpu", method="qcfuse", ratio=1.0, max_tokens=16)

    documents = [
        Document(part, id=name) for name, text in corpus().items() for part in text.split("\n\n") if len(part) > 80
    ]
    store = InMemoryVectorStore(HuggingFaceEmbeddings(model_name=default_embedder()))
    store.add_documents(documents)
    ours.warm(documents)  # the warming line; the model's line follows
    reports: list[dict[str, Any]] = []

    def text_of(message: Any) -> str:
        if "fusion" in message.response_metadata:
            reports.append(message.response_metadata["fusion"])
        return str(message.content).strip()

    last = RunnableLambda(text_of)
    chains = [create_stuff_documents_chain(chat, PROMPT, output_parser=last) for chat in (theirs, ours)]
    answers = []
    for question in smollm2_questions(COUNT):
        inputs = {"input": question, "context": store.similarity_search(question, k=3)}
        answers.append([chain.invoke(inputs) for chain in chains])
    ours.close()
    assert [mine for _, mine in answers] == [yours for yours, _ in answers]
    assert len(reports) == COUNT
    for report in reports:
        assert all(lookup["hit"] for lookup in report["lookups"])
        # The beginning that a prompt shares with an earlier one is reused without a lookup.
        assert len(report["lookups"]) == 3 or report["prefix_tokens"]
