"""A RAG chain that keeps documents separate in the prompt."""

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

    It takes the inputs of `create_stuff_documents_chain`, which formats documents into one text. This chain passes
    each document to the model separately, so its stored cache is found. The chat model's `rag_messages` word the
    prompt, because stored caches depend on that wording.

    Args:
        chat: the chat model.
        question_key: input with the question.
        document_variable_name: input with the list of documents.
        history_key: input with earlier messages; may be missing.
        output_parser: parser of the answer; None returns its text.

    Returns:
        A runnable with invoke, batch, stream and their asynchronous forms.
    """

    def answer(inputs: dict[str, Any]) -> Runnable[Any, Any]:
        messages = [*(inputs.get(history_key) or []), HumanMessage(inputs[question_key])]
        bound = chat.bind(documents=inputs[document_variable_name])
        return RunnableLambda(lambda _: messages) | bound

    return RunnableLambda(answer, name="qcfuse_documents") | (output_parser or StrOutputParser())
