"""The interface for packages that integrate a framework such as LlamaIndex; users import from `qcfuse_rag` itself.

In: a framework's settings, messages and documents, already as plain Python. Out: an engine handle that answers
requests, passages in the store, and warnings at the caller's line. Nothing here imports a framework.
"""

from qcfuse_rag.engine.config import LOAD_SETTINGS, warn_caller, warn_not_stored, warn_unused
from qcfuse_rag.engine.scheduler import AnswerRequest, EngineHandle, RequestHandle
from qcfuse_rag.generation.decoding import FINISH_REASONS
from qcfuse_rag.generation.response_format import Delta, ReasoningFormat, ResponseReader
from qcfuse_rag.generation.sampling_params import SAMPLING_SETTINGS
from qcfuse_rag.generation.tool_parsers import ParsedResponse, can_call_tools
from qcfuse_rag.integrations.engine_settings import EngineSettings, response_format_of
from qcfuse_rag.integrations.passages import Passage, warm_passages

__all__ = [
    "FINISH_REASONS",
    "LOAD_SETTINGS",
    "SAMPLING_SETTINGS",
    "AnswerRequest",
    "Delta",
    "EngineHandle",
    "EngineSettings",
    "ParsedResponse",
    "Passage",
    "ReasoningFormat",
    "RequestHandle",
    "ResponseReader",
    "can_call_tools",
    "response_format_of",
    "warm_passages",
    "warn_caller",
    "warn_not_stored",
    "warn_unused",
]
