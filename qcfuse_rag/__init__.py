"""RAG answers without re-reading the library every time: stored KV caches, fused per question."""

from qcfuse_rag.engine import FusionEngine
from qcfuse_rag.errors import (
    CorruptEntry,
    InvalidTemplate,
    ModelNotFound,
    PromptTooLong,
    QCFuseError,
    StoreError,
    UnknownMethod,
    UnsupportedModel,
)
from qcfuse_rag.fuse.method import Method
from qcfuse_rag.fuse.prefill import Prefilled
from qcfuse_rag.generate.decode import Generation, TextStream, Usage
from qcfuse_rag.generate.sampling import SamplingParams
from qcfuse_rag.ingest.base import BASES, BLIND, FRAMED, Base
from qcfuse_rag.ingest.warm import WarmSummary
from qcfuse_rag.methods import METHODS, make_method
from qcfuse_rag.model.language_model import LanguageModel
from qcfuse_rag.prompt.segments import Prompt, Role, Segment
from qcfuse_rag.prompt.template import PromptTemplate
from qcfuse_rag.report.fusion import FusionReport
from qcfuse_rag.store.contract import KVStore, Miss, StoreStats
from qcfuse_rag.store.disk import DiskStore
from qcfuse_rag.store.memory import MemoryStore
from qcfuse_rag.store.open import open_store
from qcfuse_rag.store.tiered import TieredStore

__version__ = "0.1.0"

__all__ = [
    "BASES",
    "BLIND",
    "FRAMED",
    "METHODS",
    "Base",
    "CorruptEntry",
    "DiskStore",
    "FusionEngine",
    "FusionReport",
    "Generation",
    "InvalidTemplate",
    "KVStore",
    "LanguageModel",
    "MemoryStore",
    "Method",
    "Miss",
    "ModelNotFound",
    "Prefilled",
    "Prompt",
    "PromptTemplate",
    "PromptTooLong",
    "QCFuseError",
    "Role",
    "SamplingParams",
    "Segment",
    "StoreError",
    "StoreStats",
    "TextStream",
    "TieredStore",
    "UnknownMethod",
    "UnsupportedModel",
    "Usage",
    "WarmSummary",
    "make_method",
    "open_store",
]
