"""LlamaIndex objects of qcfuse-rag."""

from llama_index.llms.qcfuse.base import QCFuseLLM
from llama_index.llms.qcfuse.events import FusionEndEvent
from llama_index.llms.qcfuse.postprocessor import QCFusePostprocessor
from llama_index.llms.qcfuse.synthesizer import QCFuseSynthesizer
from llama_index.llms.qcfuse.warmup import QCFuseWarmup

__all__ = ["FusionEndEvent", "QCFuseLLM", "QCFusePostprocessor", "QCFuseSynthesizer", "QCFuseWarmup"]
