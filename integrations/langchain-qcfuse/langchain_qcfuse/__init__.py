"""LangChain objects of qcfuse-rag."""

from langchain_qcfuse.chains import create_qcfuse_chain
from langchain_qcfuse.chat_models import ChatQCFuse

__all__ = ["ChatQCFuse", "create_qcfuse_chain"]
