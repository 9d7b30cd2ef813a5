"""The settings of a chat model and of its calls, by LangChain's names for them."""

from __future__ import annotations

from typing import Any

from qcfuse_rag.integrations import LOAD_SETTINGS, SAMPLING_SETTINGS, ResponseFormat, warn_caller

SERVICE_SETTINGS = ("api_key", "base_url", "timeout", "max_retries", "streaming")
CALL_SETTINGS = (
    "max_tokens",
    *SAMPLING_SETTINGS,
    "stop",
    "chat_template_kwargs",
    "logprobs",
    "top_logprobs",
    "documents",
    "tools",
    "tool_choice",
    "response_format",
    "stream",  # read by LangChain itself
)
ANSWER_SETTINGS = (
    "model_name",
    *LOAD_SETTINGS,
    "max_tokens",
    *SAMPLING_SETTINGS,
    "stop",
    "logprobs",
    "top_logprobs",
)


def without_service_settings(values: Any) -> Any:
    """Drop settings that LangChain's chat models use to reach a service, with a warning."""
    if not isinstance(values, dict):
        return values
    values = {name: value for name, value in values.items() if value is not None or name not in CALL_SETTINGS}
    ignored = [name for name in SERVICE_SETTINGS if values.get(name) is not None]
    if ignored:
        warn_caller(f"{' and '.join(ignored)}: no effect on a model in this process")
    return {name: value for name, value in values.items() if name not in SERVICE_SETTINGS}


def response_format_of(kwargs: dict[str, Any]) -> ResponseFormat:
    """Return the response format that a call's keyword arguments ask for."""
    return ResponseFormat(kwargs.get("tools") or (), kwargs.get("tool_choice"), kwargs.get("response_format"))
