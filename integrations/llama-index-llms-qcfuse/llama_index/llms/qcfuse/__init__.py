"""LlamaIndex objects of qcfuse-rag."""

from llama_index.llms.qcfuse.base import QCFuseLLM
from llama_index.llms.qcfuse.events import FusionEndEvent
from llama_index.llms.qcfuse.garbage_collect import forget_missing
from llama_index.llms.qcfuse.postprocessor import QCFusePostprocessor
from llama_index.llms.qcfuse.readers import read_index
from llama_index.llms.qcfuse.synthesizer import QCFuseSynthesizer
from llama_index.llms.qcfuse.vector_store import QCFuseVectorStore
from llama_index.llms.qcfuse.warmup import QCFuseWarmup

__all__ = [
    "FusionEndEvent",
    "QCFuseLLM",
    "QCFusePostprocessor",
    "QCFuseSynthesizer",
    "QCFuseVectorStore",
    "QCFuseWarmup",
    "forget_missing",
    "read_index",
]
