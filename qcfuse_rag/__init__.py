"""RAG answers without re-reading the library every time: stored KV caches, fused per question.

Names are imported when they are first used: `import qcfuse_rag` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qcfuse_rag.cluster.workers import RayWorkers
    from qcfuse_rag.engine.engine import FusionEngine
    from qcfuse_rag.engine.engine_handle import AnswerRequest, ServedEngine
    from qcfuse_rag.engine.request import ScheduledAnswer
    from qcfuse_rag.engine.scheduler import Scheduler, SchedulerSettings
    from qcfuse_rag.engine.verdict import Verdict
    from qcfuse_rag.errors import (
        Busy,
        Closed,
        CorruptEntry,
        InvalidGrammar,
        InvalidTemplate,
        MisplacedSetting,
        ModelNotFound,
        NotStored,
        ProfileError,
        PromptTooLong,
        QCFuseError,
        StoreError,
        UnknownMethod,
        UnsupportedModel,
        UnusedSetting,
        Unverified,
        UnverifiedMethod,
    )
    from qcfuse_rag.evaluation.profile.measure import profile_layers
    from qcfuse_rag.fusion.method import Method
    from qcfuse_rag.fusion.pipeline import Prefilled
    from qcfuse_rag.fusion.report import FusionReport
    from qcfuse_rag.generation.caller_warnings import warn_caller, warn_not_stored, warn_unused
    from qcfuse_rag.generation.decode import Generation, TextStream, Usage
    from qcfuse_rag.generation.response_format import AnswerForm, AnswerReader
    from qcfuse_rag.generation.sampling import SamplingParams
    from qcfuse_rag.generation.speculative import VerifiedGeneration
    from qcfuse_rag.generation.tool_parsers import ToolCall, ToolReply
    from qcfuse_rag.ingestion.capture_job import CaptureSummary
    from qcfuse_rag.ingestion.summary import WarmPlan, WarmSummary
    from qcfuse_rag.ingestion.warm_job import WarmJob
    from qcfuse_rag.methods import METHODS, choose_method, make_method
    from qcfuse_rag.methods.relaycaching.answer_cache import Kept
    from qcfuse_rag.monitoring.shadow import Drift, Shadow, ShadowSettings
    from qcfuse_rag.prompts.segments import Prompt, Role, Segment
    from qcfuse_rag.prompts.special_tokens import Rendered
    from qcfuse_rag.prompts.template import PromptTemplate, Tool, Turn
    from qcfuse_rag.runtime.language_model import LanguageModel
    from qcfuse_rag.runtime.layer_profile import LayerProfile
    from qcfuse_rag.store.backends.base import EntryInfo, Health, KVStore, Miss, StoreStats
    from qcfuse_rag.store.backends.disk import DiskStore
    from qcfuse_rag.store.backends.memory import MemoryStore
    from qcfuse_rag.store.backends.remote import RemoteStore
    from qcfuse_rag.store.backends.tenant import TenantStore
    from qcfuse_rag.store.backends.tiered import TieredStore
    from qcfuse_rag.store.chunk import ChunkKV
    from qcfuse_rag.store.documents.acl import tags_of
    from qcfuse_rag.store.documents.sources import Sources
    from qcfuse_rag.store.entry.encryption import Seal
    from qcfuse_rag.store.factory import open_store
    from qcfuse_rag.store.key import ChunkKey
    from qcfuse_rag.store.prefill_base import BASES, BEGUN, BLIND, ENRICHED, FRAMED, PRIMED, Base

__version__ = "0.1.0"

__all__ = [
    "BASES",
    "BEGUN",
    "BLIND",
    "ENRICHED",
    "FRAMED",
    "METHODS",
    "PRIMED",
    "AnswerForm",
    "AnswerReader",
    "AnswerRequest",
    "Base",
    "Busy",
    "CaptureSummary",
    "ChunkKV",
    "ChunkKey",
    "Closed",
    "CorruptEntry",
    "DiskStore",
    "Drift",
    "EntryInfo",
    "FusionEngine",
    "FusionReport",
    "Generation",
    "Health",
    "InvalidGrammar",
    "InvalidTemplate",
    "KVStore",
    "Kept",
    "LanguageModel",
    "MemoryStore",
    "Method",
    "MisplacedSetting",
    "Miss",
    "ModelNotFound",
    "NotStored",
    "Prefilled",
    "Profile",
    "ProfileError",
    "Prompt",
    "PromptTemplate",
    "PromptTooLong",
    "QCFuseError",
    "RayWorkers",
    "RemoteStore",
    "Rendered",
    "Role",
    "SamplingParams",
    "ScheduledAnswer",
    "Scheduler",
    "SchedulerSettings",
    "Seal",
    "Segment",
    "ServedEngine",
    "Shadow",
    "ShadowSettings",
    "Sources",
    "StoreError",
    "StoreStats",
    "TenantStore",
    "TextStream",
    "TieredStore",
    "Tool",
    "ToolCall",
    "ToolReply",
    "Turn",
    "UnknownMethod",
    "UnsupportedModel",
    "UnusedSetting",
    "Unverified",
    "UnverifiedMethod",
    "Usage",
    "Verdict",
    "VerifiedGeneration",
    "WarmJob",
    "WarmPlan",
    "WarmSummary",
    "choose_method",
    "make_method",
    "open_store",
    "profile_layers",
    "tags_of",
    "warn_caller",
    "warn_not_stored",
    "warn_unused",
]

_HOMES = {
    "AnswerRequest": "qcfuse_rag.engine.engine_handle",
    "AnswerForm": "qcfuse_rag.generation.response_format",
    "AnswerReader": "qcfuse_rag.generation.response_format",
    "ToolCall": "qcfuse_rag.generation.tool_parsers",
    "ToolReply": "qcfuse_rag.generation.tool_parsers",
    "InvalidGrammar": "qcfuse_rag.errors",
    "Tool": "qcfuse_rag.prompts.template",
    "Turn": "qcfuse_rag.prompts.template",
    "BASES": "qcfuse_rag.store.prefill_base",
    "BEGUN": "qcfuse_rag.store.prefill_base",
    "ENRICHED": "qcfuse_rag.store.prefill_base",
    "BLIND": "qcfuse_rag.store.prefill_base",
    "Base": "qcfuse_rag.store.prefill_base",
    "CaptureSummary": "qcfuse_rag.ingestion.capture_job",
    "ChunkKV": "qcfuse_rag.store.chunk",
    "ChunkKey": "qcfuse_rag.store.key",
    "CorruptEntry": "qcfuse_rag.errors",
    "Busy": "qcfuse_rag.errors",
    "Closed": "qcfuse_rag.errors",
    "DiskStore": "qcfuse_rag.store.backends.disk",
    "EntryInfo": "qcfuse_rag.store.backends.base",
    "FRAMED": "qcfuse_rag.store.prefill_base",
    "FusionEngine": "qcfuse_rag.engine.engine",
    "PRIMED": "qcfuse_rag.store.prefill_base",
    "FusionReport": "qcfuse_rag.fusion.report",
    "Generation": "qcfuse_rag.generation.decode",
    "Health": "qcfuse_rag.store.backends.base",
    "InvalidTemplate": "qcfuse_rag.errors",
    "KVStore": "qcfuse_rag.store.backends.base",
    "Kept": "qcfuse_rag.methods.relaycaching.answer_cache",
    "LanguageModel": "qcfuse_rag.runtime.language_model",
    "METHODS": "qcfuse_rag.methods",
    "MemoryStore": "qcfuse_rag.store.backends.memory",
    "Method": "qcfuse_rag.fusion.method",
    "Miss": "qcfuse_rag.store.backends.base",
    "ModelNotFound": "qcfuse_rag.errors",
    "NotStored": "qcfuse_rag.errors",
    "Prefilled": "qcfuse_rag.fusion.pipeline",
    "Profile": "qcfuse_rag.runtime.layer_profile",
    "ProfileError": "qcfuse_rag.errors",
    "Prompt": "qcfuse_rag.prompts.segments",
    "PromptTemplate": "qcfuse_rag.prompts.template",
    "Rendered": "qcfuse_rag.prompts.special_tokens",
    "PromptTooLong": "qcfuse_rag.errors",
    "QCFuseError": "qcfuse_rag.errors",
    "RayWorkers": "qcfuse_rag.cluster.workers",
    "RemoteStore": "qcfuse_rag.store.backends.remote",
    "Role": "qcfuse_rag.prompts.segments",
    "SamplingParams": "qcfuse_rag.generation.sampling",
    "ScheduledAnswer": "qcfuse_rag.engine.request",
    "Scheduler": "qcfuse_rag.engine.scheduler",
    "SchedulerSettings": "qcfuse_rag.engine.scheduler",
    "Seal": "qcfuse_rag.store.entry.encryption",
    "Segment": "qcfuse_rag.prompts.segments",
    "ServedEngine": "qcfuse_rag.engine.engine_handle",
    "Sources": "qcfuse_rag.store.documents.sources",
    "StoreError": "qcfuse_rag.errors",
    "StoreStats": "qcfuse_rag.store.backends.base",
    "TenantStore": "qcfuse_rag.store.backends.tenant",
    "TextStream": "qcfuse_rag.generation.decode",
    "TieredStore": "qcfuse_rag.store.backends.tiered",
    "UnknownMethod": "qcfuse_rag.errors",
    "MisplacedSetting": "qcfuse_rag.errors",
    "UnusedSetting": "qcfuse_rag.errors",
    "UnsupportedModel": "qcfuse_rag.errors",
    "Usage": "qcfuse_rag.generation.decode",
    "Drift": "qcfuse_rag.monitoring.shadow",
    "Shadow": "qcfuse_rag.monitoring.shadow",
    "ShadowSettings": "qcfuse_rag.monitoring.shadow",
    "Unverified": "qcfuse_rag.errors",
    "UnverifiedMethod": "qcfuse_rag.errors",
    "Verdict": "qcfuse_rag.engine.verdict",
    "VerifiedGeneration": "qcfuse_rag.generation.speculative",
    "WarmJob": "qcfuse_rag.ingestion.warm_job",
    "WarmPlan": "qcfuse_rag.ingestion.summary",
    "WarmSummary": "qcfuse_rag.ingestion.summary",
    "choose_method": "qcfuse_rag.methods",
    "make_method": "qcfuse_rag.methods",
    "open_store": "qcfuse_rag.store.factory",
    "profile_layers": "qcfuse_rag.evaluation.profile.measure",
    "tags_of": "qcfuse_rag.store.documents.acl",
    "warn_caller": "qcfuse_rag.generation.caller_warnings",
    "warn_not_stored": "qcfuse_rag.generation.caller_warnings",
    "warn_unused": "qcfuse_rag.generation.caller_warnings",
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module it lives in."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
