"""Set-ups of LlamaIndex, as its users write them. Every node is as near to the question as any other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from llama_index.core import Document, MockEmbedding, SimpleDirectoryReader, StorageContext, VectorStoreIndex
from llama_index.core import node_parser as parsers
from llama_index.core import query_engine as engines
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.chat_engine import CondensePlusContextChatEngine
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.question_gen.types import BaseQuestionGenerator, SubQuestion
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import AutoMergingRetriever
from llama_index.core.selectors import EmbeddingSingleSelector
from llama_index.core.tools import QueryEngineTool, ToolMetadata
from pydantic import create_model

from benchmarks.reuse.recording import TOP_K, Holder, Setting, SetUp, run
from llama_index.llms.qcfuse import QCFuseLLM, QCFuseWarmup

EMBED = MockEmbedding(embed_dim=4)
WINDOW: Any = {"target_metadata_key": "window"}


class _SameQuestion(BaseQuestionGenerator):  # type: ignore[misc]
    """Asks every tool the question, as a model of useful size might."""

    def generate(self, tools: Any, query: Any) -> list[SubQuestion]:
        return [SubQuestion(sub_question=str(query), tool_name=tool.name) for tool in tools]

    async def agenerate(self, tools: Any, query: Any) -> list[SubQuestion]:
        return self.generate(tools, query)

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: Any) -> None:
        pass


def warmed(llm: QCFuseLLM, documents: list[Document], parser: Any = None, **warming: Any) -> Any:
    """Split documents, warm the nodes and index them."""
    nodes = (parser or parsers.SentenceSplitter(chunk_size=512))(documents)
    return VectorStoreIndex(QCFuseWarmup(llm, **warming)(nodes), embed_model=EMBED)


def _documents(setting: Setting) -> list[Document]:
    """Return the documents with metadata that the model is shown."""
    return [Document(text=text, id_=name, metadata={"title": name}) for name, text in setting.texts.items()]


def _engine(setting: Setting, llm: QCFuseLLM, **options: Any) -> Any:
    return warmed(llm, _documents(setting)).as_query_engine(llm=llm, similarity_top_k=TOP_K, **options)


def _citations(setting: Setting, llm: QCFuseLLM) -> Any:
    for name, text in setting.texts.items():
        (setting.folder / name).with_suffix(".txt").write_text(text, "utf-8")
    index = warmed(llm, SimpleDirectoryReader(str(setting.folder), filename_as_id=True).load_data())
    return engines.CitationQueryEngine.from_args(index, llm=llm, similarity_top_k=TOP_K)


def _auto_merging(setting: Setting, llm: QCFuseLLM) -> Any:
    """Leaves are warmed, and the parents that the retriever makes of them shown."""
    nodes = parsers.HierarchicalNodeParser.from_defaults(chunk_sizes=[512, 128])(_documents(setting))
    context = StorageContext.from_defaults()
    context.docstore.add_documents(nodes)
    leaves = QCFuseWarmup(llm)(parsers.get_leaf_nodes(nodes))
    index = VectorStoreIndex(leaves, storage_context=context, embed_model=EMBED)
    retriever = AutoMergingRetriever(index.as_retriever(similarity_top_k=2 * TOP_K), context)
    return engines.RetrieverQueryEngine.from_args(retriever, llm=llm)


def _windows(setting: Setting, llm: QCFuseLLM) -> Any:
    index = warmed(llm, _documents(setting)[:2], parsers.SentenceWindowNodeParser(window_size=1), **WINDOW)
    shown = [MetadataReplacementPostProcessor(**WINDOW)]
    return index.as_query_engine(llm=llm, similarity_top_k=TOP_K, node_postprocessors=shown)


def _windows_of_chunks(setting: Setting, llm: QCFuseLLM) -> Any:
    """Warm the documents in pieces that do not overlap, and retrieve windows of them."""
    pieces = QCFuseWarmup(llm)(parsers.SentenceSplitter(chunk_size=512)(_documents(setting)[:2]))
    nodes = parsers.SentenceWindowNodeParser(window_size=3)(pieces)
    shown = [MetadataReplacementPostProcessor(**WINDOW)]
    index = VectorStoreIndex(nodes, embed_model=EMBED)
    return index.as_query_engine(llm=llm, similarity_top_k=TOP_K, node_postprocessors=shown)


def _sub_questions(setting: Setting, llm: QCFuseLLM) -> Any:
    options: Any = {"response_synthesizer": get_response_synthesizer(llm=llm), "use_async": False, "verbose": False}
    return engines.SubQuestionQueryEngine(_SameQuestion(), query_engine_tools=_tools(setting, llm), **options)


def _router(setting: Setting, llm: QCFuseLLM) -> Any:
    return engines.RouterQueryEngine(EmbeddingSingleSelector.from_defaults(EMBED), _tools(setting, llm), llm=llm)


def _tools(setting: Setting, llm: QCFuseLLM) -> list[QueryEngineTool]:
    """Return two tools, which can be asked nothing but the question."""
    asked = create_model("Asked", input=(Literal[setting.question], ...))  # type: ignore[arg-type]
    about = [ToolMetadata(f"Search the {name} reports.", name, asked) for name in ("old", "new")]
    return [QueryEngineTool(_engine(setting, llm), metadata) for metadata in about]


def _chat(setting: Setting, llm: QCFuseLLM) -> None:
    retriever = warmed(llm, _documents(setting)).as_retriever(similarity_top_k=TOP_K)
    chat = CondensePlusContextChatEngine.from_defaults(retriever, llm=llm)
    chat.chat(setting.question)
    chat.chat("And who else?")


def _agent(setting: Setting, llm: QCFuseLLM) -> None:
    async def chat() -> None:
        agent = FunctionAgent(tools=_tools(setting, llm), llm=llm, initial_tool_choice="old")
        await agent.run(user_msg=setting.question)

    asyncio.run(chat())


def _query(make: Callable[..., Any], setting: Setting, llm: QCFuseLLM) -> None:
    make(setting, llm).query(setting.question)


_run = partial(run, lambda engine, tokens: QCFuseLLM.from_engine(engine, max_new_tokens=tokens))
MAKERS: dict[str, Callable[..., Any]] = {
    "query engine": _engine,
    "tree_summarize": partial(_engine, response_mode="tree_summarize"),
    "refine": partial(_engine, response_mode="refine"),
    "CitationQueryEngine": _citations,
    "AutoMergingRetriever": _auto_merging,
    "sentence windows": _windows,
    "sentence windows of warmed chunks": _windows_of_chunks,
    "SubQuestionQueryEngine": _sub_questions,
    "RouterQueryEngine": _router,
    "structured answer": partial(_engine, output_cls=Holder),
}
SET_UPS: dict[str, SetUp] = {
    **{f"LlamaIndex: {name}": partial(_run, partial(_query, make)) for name, make in MAKERS.items()},
    "LlamaIndex: condense_plus_context": partial(_run, _chat),
    "LlamaIndex: FunctionAgent": partial(_run, _agent, tools=True),
}
