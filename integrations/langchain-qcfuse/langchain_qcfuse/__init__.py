"""LangChain objects of qcfuse-rag."""

from langchain_qcfuse.chains import create_qcfuse_chain
from langchain_qcfuse.chat_models import ChatQCFuse
from langchain_qcfuse.prefetch import QCFusePrefetch
from langchain_qcfuse.readers import read_vector_store
from langchain_qcfuse.vector_store import QCFuseVectorStore

__all__ = [
    "ChatQCFuse",
    "QCFusePrefetch",
    "QCFuseVectorStore",
    "create_qcfuse_chain",
    "read_vector_store",
]
