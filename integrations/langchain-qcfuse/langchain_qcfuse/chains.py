"""A RAG chain that keeps documents apart."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.runnables import Runnable, RunnableLambda

from langchain_qcfuse.chat_models import ChatQCFuse


def create_qcfuse_chain(
    chat: ChatQCFuse,
    *,
    question_key: str = "input",
    document_variable_name: str = "context",
    history_key: str = "chat_history",
    output_parser: BaseOutputParser[Any] | None = None,
) -> Runnable[dict[str, Any], Any]:
    """Create a chain that answers a question over a list of documents.

    Takes the inputs of `create_stuff_documents_chain`, which formats documents into one text; this chain hands them
    to the model one by one, so that their stored caches are found. The prompt's wording is the chat model's
    `rag_messages`, because it is part of what is stored.

    Args:
        chat: the chat model.
        question_key: input that holds the question.
        document_variable_name: input that holds the list of documents.
        history_key: input that holds earlier messages; may be missing.
        output_parser: of the answer; text by default.

    Returns:
        A runnable with invoke, batch, stream and their asynchronous forms.
    """

    def answer(inputs: dict[str, Any]) -> Runnable[Any, Any]:
        messages = [*(inputs.get(history_key) or []), HumanMessage(inputs[question_key])]
        bound = chat.bind(documents=inputs[document_variable_name])
        return RunnableLambda(lambda _: messages) | bound

    return RunnableLambda(answer, name="qcfuse_documents") | (output_parser or StrOutputParser())
