"""An agent with a query engine as its tool.

The default model of 135M parameters calls no tools, so a scripted planner stands in: give a model that can, such as
QCFuseLLM(model="Qwen/Qwen2.5-1.5B-Instruct"), to the agent in its place, or the same to both.
"""

import asyncio

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms.mock import MockFunctionCallingLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.tools import QueryEngineTool
from llama_index.embeddings.huggingface import HuggingFaceEmbedding

from llama_index.llms.qcfuse import QCFuseLLM, QCFuseWarmup
from qcfuse_rag.bundled import corpus, default_embedder, default_model

llm = QCFuseLLM(model=default_model(), store="kv")
embed = HuggingFaceEmbedding(model_name=default_embedder())
documents = [Document(text=text, id_=name) for name, text in corpus().items()]
steps = [SentenceSplitter(chunk_size=512), embed, QCFuseWarmup(llm)]
nodes = IngestionPipeline(transformations=steps).run(documents=documents)
index = VectorStoreIndex(nodes, embed_model=embed)

queries = index.as_query_engine(llm=llm, similarity_top_k=3)
library = QueryEngineTool.from_defaults(queries, name="library", description="Answers questions about Vellmar Sound.")


def plan(messages: list[ChatMessage], **_: object) -> ChatMessage:
    """Ask the tool for the question, then answer with what it says."""
    last = messages[-1]
    if last.role == "tool":
        return ChatMessage(role="assistant", content=last.content)
    call = ToolCallBlock(tool_call_id="1", tool_name="library", tool_kwargs={"input": last.content})
    return ChatMessage(role="assistant", blocks=[call])


async def main() -> None:
    """Run the agent."""
    agent = FunctionAgent(tools=[library], llm=MockFunctionCallingLLM(response_generator=plan))
    print(await agent.run("What is the name of the ambulance boat of Merrin Hospital?"))


asyncio.run(main())
