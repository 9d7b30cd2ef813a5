"""RAG answers without re-reading the library every time: stored KV caches, fused per question.

Names are imported when they are first used: `import qcfuse_rag` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qcfuse_rag.cluster.workers import RayWorkers
    from qcfuse_rag.engine import FusionEngine
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
    from qcfuse_rag.fuse.method import Method
    from qcfuse_rag.fuse.prefill import Prefilled
    from qcfuse_rag.generate.answer_form import AnswerForm, AnswerReader
    from qcfuse_rag.generate.call_syntax import ToolCall, ToolReply
    from qcfuse_rag.generate.decode import Generation, TextStream, Usage
    from qcfuse_rag.generate.sampling import SamplingParams
    from qcfuse_rag.generate.scheduled import ScheduledAnswer
    from qcfuse_rag.generate.scheduler import Scheduler, SchedulerSettings
    from qcfuse_rag.generate.served import AnswerRequest, ServedEngine
    from qcfuse_rag.generate.unused import warn_caller, warn_not_stored, warn_unused
    from qcfuse_rag.generate.verify import VerifiedGeneration
    from qcfuse_rag.ingest.base import BASES, BEGUN, BLIND, ENRICHED, FRAMED, PRIMED, Base
    from qcfuse_rag.ingest.generated import Kept
    from qcfuse_rag.ingest.keep import CaptureSummary
    from qcfuse_rag.ingest.summary import WarmPlan, WarmSummary
    from qcfuse_rag.ingest.warm import WarmJob
    from qcfuse_rag.methods import METHODS, choose_method, make_method
    from qcfuse_rag.model.language_model import LanguageModel
    from qcfuse_rag.profile.measure import profile_layers
    from qcfuse_rag.profile.profile import Profile
    from qcfuse_rag.prompt.rendered import Rendered
    from qcfuse_rag.prompt.segments import Prompt, Role, Segment
    from qcfuse_rag.prompt.template import PromptTemplate, Tool, Turn
    from qcfuse_rag.report.fusion import FusionReport
    from qcfuse_rag.store.access import tags_of
    from qcfuse_rag.store.chunk import ChunkKV
    from qcfuse_rag.store.contract import EntryInfo, Health, KVStore, Miss, StoreStats
    from qcfuse_rag.store.disk import DiskStore
    from qcfuse_rag.store.key import ChunkKey
    from qcfuse_rag.store.memory import MemoryStore
    from qcfuse_rag.store.open import open_store
    from qcfuse_rag.store.remote import RemoteStore
    from qcfuse_rag.store.seal import Seal
    from qcfuse_rag.store.sources import Sources
    from qcfuse_rag.store.tenant import TenantStore
    from qcfuse_rag.store.tiered import TieredStore
    from qcfuse_rag.trust.shadow import Drift, Shadow, ShadowSettings
    from qcfuse_rag.trust.verdict import Verdict

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
    "AnswerRequest": "qcfuse_rag.generate.served",
    "AnswerForm": "qcfuse_rag.generate.answer_form",
    "AnswerReader": "qcfuse_rag.generate.answer_form",
    "ToolCall": "qcfuse_rag.generate.call_syntax",
    "ToolReply": "qcfuse_rag.generate.call_syntax",
    "InvalidGrammar": "qcfuse_rag.errors",
    "Tool": "qcfuse_rag.prompt.template",
    "Turn": "qcfuse_rag.prompt.template",
    "BASES": "qcfuse_rag.ingest.base",
    "BEGUN": "qcfuse_rag.ingest.base",
    "ENRICHED": "qcfuse_rag.ingest.base",
    "BLIND": "qcfuse_rag.ingest.base",
    "Base": "qcfuse_rag.ingest.base",
    "CaptureSummary": "qcfuse_rag.ingest.keep",
    "ChunkKV": "qcfuse_rag.store.chunk",
    "ChunkKey": "qcfuse_rag.store.key",
    "CorruptEntry": "qcfuse_rag.errors",
    "Busy": "qcfuse_rag.errors",
    "Closed": "qcfuse_rag.errors",
    "DiskStore": "qcfuse_rag.store.disk",
    "EntryInfo": "qcfuse_rag.store.contract",
    "FRAMED": "qcfuse_rag.ingest.base",
    "FusionEngine": "qcfuse_rag.engine",
    "PRIMED": "qcfuse_rag.ingest.base",
    "FusionReport": "qcfuse_rag.report.fusion",
    "Generation": "qcfuse_rag.generate.decode",
    "Health": "qcfuse_rag.store.contract",
    "InvalidTemplate": "qcfuse_rag.errors",
    "KVStore": "qcfuse_rag.store.contract",
    "Kept": "qcfuse_rag.ingest.generated",
    "LanguageModel": "qcfuse_rag.model.language_model",
    "METHODS": "qcfuse_rag.methods",
    "MemoryStore": "qcfuse_rag.store.memory",
    "Method": "qcfuse_rag.fuse.method",
    "Miss": "qcfuse_rag.store.contract",
    "ModelNotFound": "qcfuse_rag.errors",
    "NotStored": "qcfuse_rag.errors",
    "Prefilled": "qcfuse_rag.fuse.prefill",
    "Profile": "qcfuse_rag.profile.profile",
    "ProfileError": "qcfuse_rag.errors",
    "Prompt": "qcfuse_rag.prompt.segments",
    "PromptTemplate": "qcfuse_rag.prompt.template",
    "Rendered": "qcfuse_rag.prompt.rendered",
    "PromptTooLong": "qcfuse_rag.errors",
    "QCFuseError": "qcfuse_rag.errors",
    "RayWorkers": "qcfuse_rag.cluster.workers",
    "RemoteStore": "qcfuse_rag.store.remote",
    "Role": "qcfuse_rag.prompt.segments",
    "SamplingParams": "qcfuse_rag.generate.sampling",
    "ScheduledAnswer": "qcfuse_rag.generate.scheduled",
    "Scheduler": "qcfuse_rag.generate.scheduler",
    "SchedulerSettings": "qcfuse_rag.generate.scheduler",
    "Seal": "qcfuse_rag.store.seal",
    "Segment": "qcfuse_rag.prompt.segments",
    "ServedEngine": "qcfuse_rag.generate.served",
    "Sources": "qcfuse_rag.store.sources",
    "StoreError": "qcfuse_rag.errors",
    "StoreStats": "qcfuse_rag.store.contract",
    "TenantStore": "qcfuse_rag.store.tenant",
    "TextStream": "qcfuse_rag.generate.decode",
    "TieredStore": "qcfuse_rag.store.tiered",
    "UnknownMethod": "qcfuse_rag.errors",
    "MisplacedSetting": "qcfuse_rag.errors",
    "UnusedSetting": "qcfuse_rag.errors",
    "UnsupportedModel": "qcfuse_rag.errors",
    "Usage": "qcfuse_rag.generate.decode",
    "Drift": "qcfuse_rag.trust.shadow",
    "Shadow": "qcfuse_rag.trust.shadow",
    "ShadowSettings": "qcfuse_rag.trust.shadow",
    "Unverified": "qcfuse_rag.errors",
    "UnverifiedMethod": "qcfuse_rag.errors",
    "Verdict": "qcfuse_rag.trust.verdict",
    "VerifiedGeneration": "qcfuse_rag.generate.verify",
    "WarmJob": "qcfuse_rag.ingest.warm",
    "WarmPlan": "qcfuse_rag.ingest.summary",
    "WarmSummary": "qcfuse_rag.ingest.summary",
    "choose_method": "qcfuse_rag.methods",
    "make_method": "qcfuse_rag.methods",
    "open_store": "qcfuse_rag.store.open",
    "profile_layers": "qcfuse_rag.profile.measure",
    "tags_of": "qcfuse_rag.store.access",
    "warn_caller": "qcfuse_rag.generate.unused",
    "warn_not_stored": "qcfuse_rag.generate.unused",
    "warn_unused": "qcfuse_rag.generate.unused",
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module it lives in."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
