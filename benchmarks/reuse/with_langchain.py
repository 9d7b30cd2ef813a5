"""Set-ups of LangChain, as its users write them. What a question is near to is left to chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import ParentDocumentRetriever
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.stores import InMemoryStore
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter
from pydantic import create_model

from benchmarks.reuse.recording import CALL_TOKENS, TOP_K, Holder, Setting, SetUp, run
from langchain_qcfuse import ChatQCFuse, QCFuseVectorStore
from langchain_qcfuse.middleware import QCFuseMiddleware

EMBED = DeterministicFakeEmbedding(size=4)
WORDING = ChatPromptTemplate.from_messages([("system", "Answer from this:\n\n{context}"), ("human", "{input}")])
ALONE = ChatPromptTemplate.from_messages(
    [("system", "Ask so that it can be understood alone."), ("placeholder", "{chat_history}"), ("human", "{input}")]
)


class _CallsFirst(AgentMiddleware):  # type: ignore[misc]
    """Demands a call of a tool before the answer: small models do not call by themselves."""

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        has_result = isinstance(request.messages[-1], ToolMessage)
        return handler(request if has_result else request.override(tool_choice="any"))


def documents(setting: Setting, end: str = "") -> list[Document]:
    """Return the documents with their sources, and an end for their texts."""
    return [Document(text.strip() + end, metadata={"source": name}) for name, text in setting.texts.items()]


def retriever_of(given: Sequence[Document]) -> Any:
    """Return a retriever over documents."""
    return InMemoryVectorStore.from_documents([*given], EMBED).as_retriever(search_kwargs={"k": TOP_K})


def _warmed(setting: Setting, chat: ChatQCFuse) -> Any:
    chat.warm(documents(setting))
    return retriever_of(documents(setting))


def _joined(found: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in found)


def answer(setting: Setting, chat: ChatQCFuse, retriever: Any) -> None:
    """Ask a chain that stuffs what it retrieves into the prompt."""
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(chat, WORDING))
    chain.invoke({"input": setting.question, "chat_history": [("human", "Good morning."), ("ai", "Good morning.")]})


def _retrieval_chain(setting: Setting, chat: ChatQCFuse) -> None:
    answer(setting, chat, _warmed(setting, chat))


def _lcel(setting: Setting, chat: ChatQCFuse) -> None:
    pieces = RecursiveCharacterTextSplitter(chunk_size=500, chunk_overlap=50).split_documents(documents(setting))
    chat.warm(pieces)
    inputs = {"context": retriever_of(pieces) | RunnableLambda(_joined), "input": RunnablePassthrough()}
    (inputs | WORDING | chat | StrOutputParser()).invoke(setting.question)


def _parent_documents(setting: Setting, chat: ChatQCFuse) -> None:
    """Small pieces are warmed, and in their place their documents shown."""
    vectors, splitter = QCFuseVectorStore(InMemoryVectorStore(EMBED), chat), RecursiveCharacterTextSplitter
    parents = ParentDocumentRetriever(
        vectorstore=vectors, docstore=InMemoryStore(), child_splitter=splitter(chunk_size=300, chunk_overlap=0)
    )
    parents.add_documents(documents(setting))
    answer(setting, chat, parents)


def _history_aware(setting: Setting, chat: ChatQCFuse) -> None:
    answer(setting, chat, create_history_aware_retriever(chat, _warmed(setting, chat), ALONE))


def _structured(setting: Setting, chat: ChatQCFuse) -> None:
    context = _joined(_warmed(setting, chat).invoke(setting.question))
    (WORDING | chat.with_structured_output(Holder, max_tokens=CALL_TOKENS)).invoke(
        {"context": context, "input": setting.question}
    )


def _middleware(setting: Setting, chat: ChatQCFuse) -> None:
    agent = create_agent(chat, [], middleware=[QCFuseMiddleware(chat, _warmed(setting, chat))])
    agent.invoke({"messages": [("human", setting.question)]})


def _tool(setting: Setting, chat: ChatQCFuse) -> None:
    """The tool can be asked nothing but the question."""
    tool = create_retriever_tool(_warmed(setting, chat), "search", "Search.")
    tool.args_schema = create_model("Asked", query=(Literal[setting.question], ...))  # type: ignore[arg-type]
    agent = create_agent(chat, [tool], middleware=[_CallsFirst()])
    agent.invoke({"messages": [("human", setting.question)]})


_run = partial(run, lambda engine, tokens: ChatQCFuse.from_engine(engine, max_tokens=tokens))
SET_UPS: dict[str, SetUp] = {
    "LangChain: retrieval chain": partial(_run, _retrieval_chain),
    "LangChain: LCEL": partial(_run, _lcel),
    "LangChain: ParentDocumentRetriever": partial(_run, _parent_documents),
    "LangChain: history-aware retriever": partial(_run, _history_aware),
    "LangChain: structured answer": partial(_run, _structured),
    "LangChain: agent with middleware": partial(_run, _middleware),
    "LangChain: agent with a retriever tool": partial(_run, _tool, tools=True),
}
