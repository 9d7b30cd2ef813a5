"""Bind a chat model to a schema and parse its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from operator import itemgetter
from typing import Any, TypeGuard

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

TRUNCATION_ADVICE = {"length": "raise max_tokens", "stop": "a string of `stop` stands in it"}
"""What to do about an answer that ended for this reason."""


def bind_json_schema(
    chat: BaseChatModel, schema: dict[str, Any] | type, *, include_raw: bool, any_object: bool, options: dict[str, Any]
) -> Runnable[LanguageModelInput, Any]:
    """Return a chat model that writes JSON of a schema, or `any_object`, with a parser after it."""
    json_schema = convert_to_json_schema(schema)
    by_schema = {"type": "json_schema", "json_schema": {"name": json_schema["title"], "schema": json_schema}}
    tracing = {"kwargs": {"method": "json_mode" if any_object else "json_schema"}, "schema": json_schema}
    bound = chat.bind(
        response_format={"type": "json_object"} if any_object else by_schema,
        ls_structured_output_format=tracing,
        **_without_strict(options),
    )
    if is_pydantic_class(schema):
        return with_parser(PydanticOutputParser(pydantic_object=schema), bound, include_raw)
    return with_parser(JsonOutputParser(), bound, include_raw)


def bind_schema_tool(
    chat: BaseChatModel, schema: dict[str, Any] | type, *, include_raw: bool, options: dict[str, Any]
) -> Runnable[LanguageModelInput, Any]:
    """Return a chat model that must call a tool of a schema, with a parser after it."""
    tracing = {"kwargs": {"method": "function_calling"}, "schema": schema}
    options = _without_strict(options)
    bound = chat.bind_tools([schema], tool_choice="any", ls_structured_output_format=tracing, **options)
    if is_pydantic_class(schema):
        return with_parser(PydanticToolsParser(tools=[schema], first_tool_only=True), bound, include_raw)
    name = convert_to_openai_tool(schema)["function"]["name"]
    return with_parser(JsonOutputKeyToolsParser(key_name=name, first_tool_only=True), bound, include_raw)


def with_parser(
    output_parser: BaseOutputParser[Any], bound: Runnable[LanguageModelInput, AIMessage], include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """Put a parser after a chat model; truncated answers are rejected before they are parsed."""
    parser = RunnableGenerator(reject_truncated, areject_truncated) | output_parser
    if not include_raw:
        return bound | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def reject_truncated(messages: Iterator[AIMessage]) -> Iterator[AIMessage]:
    """Pass an answer on.

    Raises:
        OutputParserException: if it was cut off; half an object may parse, but is not the answer.
    """
    for message in messages:
        _require_complete(message)
        yield message


async def areject_truncated(messages: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    """Pass an answer on like `reject_truncated`."""
    async for message in messages:
        _require_complete(message)
        yield message


def is_pydantic_class(schema: Any) -> TypeGuard[type[BaseModel]]:
    """Return whether a schema is a pydantic class."""
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def _require_complete(message: AIMessage) -> None:
    reason = message.response_metadata.get("ended_by")
    if reason not in (None, "end"):  # None: a chunk of a stream other than the last
        advice = TRUNCATION_ADVICE.get(reason, reason)
        raise OutputParserException(f"the answer was cut off before its JSON was complete: {advice}")


def _without_strict(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "strict"}  # schemas are always followed strictly
