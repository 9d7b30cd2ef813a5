"""An agent's middleware that passes retrieved documents and tools' results to the model as passages.

It needs `langchain`, as agents do, which the other modules do not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Annotated, Any, NotRequired

from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
from langchain.agents.middleware.types import PrivateStateAttr, ToolCallRequest
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.retrievers import BaseRetriever
from langgraph.runtime import Runtime
from langgraph.types import Command

from langchain_qcfuse.chat_models import ChatQCFuse


class RetrievedState(AgentState[Any]):
    """The state of an agent, with what was retrieved for the last question."""

    retrieved_documents: NotRequired[Annotated[list[Document], PrivateStateAttr]]


class QCFuseMiddleware(AgentMiddleware[RetrievedState, Any, Any]):
    """Passes what an agent retrieves as passages, whose caches are reused in later calls, turns and processes.

    With a retriever, documents are retrieved once for each question and passed as `documents`, so they stay before it
    while tools are called. Results of tools are warmed where they arrive: a list of documents, as in the artifact of a
    retriever tool, one by one, any other result as a whole. They are found in the conversation and not prefilled again.
    Caches of results are kept in the chat model's store.

    Example:
        ```python
        agent = create_agent(chat, tools, middleware=[QCFuseMiddleware(chat, retriever)])
        ```

    Args:
        chat: the chat model of the agent.
        retriever: where to retrieve documents for each question; None: nowhere.
        tools: names of the tools whose results are warmed; None: of all tools.
    """

    state_schema = RetrievedState

    def __init__(
        self, chat: ChatQCFuse, retriever: BaseRetriever | None = None, tools: Collection[str] | None = None
    ) -> None:
        super().__init__()
        self._chat, self._retriever, self._tools = chat, retriever, tools

    def before_agent(self, state: RetrievedState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        """Retrieve documents for the last question."""
        if self._retriever is None or (question := _question(state)) is None:
            return None
        return {"retrieved_documents": self._retriever.invoke(question)}

    async def abefore_agent(self, state: RetrievedState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        """Retrieve documents for the last question."""
        if self._retriever is None or (question := _question(state)) is None:
            return None
        return {"retrieved_documents": await self._retriever.ainvoke(question)}

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Pass the retrieved documents."""
        return handler(self._with_documents(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """Pass the retrieved documents."""
        return await handler(self._with_documents(request))

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]]
    ) -> ToolMessage | Command[Any]:
        """Warm a tool's result."""
        result = handler(request)
        self._chat.warm(self._documents_of(result))
        return result

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
    ) -> ToolMessage | Command[Any]:
        """Warm a tool's result on a worker thread."""
        result = await handler(request)
        await asyncio.to_thread(self._chat.warm, self._documents_of(result))
        return result

    def _with_documents(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        if self._retriever is None:
            return request
        documents = request.state.get("retrieved_documents")
        return request.override(model_settings={**request.model_settings, "documents": documents})

    def _documents_of(self, result: ToolMessage | Command[Any]) -> list[Document]:
        if not isinstance(result, ToolMessage) or result.status == "error":
            return []
        if self._tools is not None and result.name not in self._tools:
            return []
        found = result.artifact if isinstance(result.artifact, list) else []
        documents = [item for item in found if isinstance(item, Document) and item.page_content in result.text]
        return documents or ([Document(result.text)] if result.text else [])


def _question(state: RetrievedState) -> str | None:
    questions = [message.text for message in state["messages"] if isinstance(message, HumanMessage)]
    return str(questions[-1]) if questions else None
