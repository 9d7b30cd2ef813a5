"""Answers that are objects of a schema."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

CUT = {"length": "raise max_tokens", "stop": "a string of `stop` stands in it"}
"""What to do about an answer that ended for this reason."""


def structured(
    chat: BaseChatModel, schema: dict[str, Any] | type, *, include_raw: bool, any_object: bool, options: dict[str, Any]
) -> Runnable[LanguageModelInput, Any]:
    """Return a chat model that follows a schema, with a parser behind it.

    Args:
        chat: the chat model, which takes OpenAI's `response_format`.
        schema: a pydantic class, a typed dictionary or a JSON schema.
        include_raw: return `raw`, `parsed` and `parsing_error` rather than raise.
        any_object: let it write any object, and only parse by the schema.
        options: of its calls.
    """
    shape = convert_to_json_schema(schema)
    wanted = {"type": "json_schema", "json_schema": {"name": shape["title"], "schema": shape}}
    options = {name: value for name, value in options.items() if name != "strict"}  # it always is
    bound = chat.bind(
        response_format={"type": "json_object"} if any_object else wanted,
        ls_structured_output_format={
            "kwargs": {"method": "json_mode" if any_object else "json_schema"},
            "schema": shape,
        },
        **options,
    )
    typed = isinstance(schema, type) and is_basemodel_subclass(schema)
    return parsed_by(PydanticOutputParser(pydantic_object=schema) if typed else JsonOutputParser(), bound, include_raw)


def called(
    chat: BaseChatModel, schema: dict[str, Any] | type, *, include_raw: bool, options: dict[str, Any]
) -> Runnable[LanguageModelInput, Any]:
    """Return a chat model that calls a tool of a schema's shape, with a parser behind it."""
    about = {"kwargs": {"method": "function_calling"}, "schema": schema}
    options = {name: value for name, value in options.items() if name != "strict"}
    bound = chat.bind_tools([schema], tool_choice="any", ls_structured_output_format=about, **options)
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return parsed_by(PydanticToolsParser(tools=[schema], first_tool_only=True), bound, include_raw)
    name = convert_to_openai_tool(schema)["function"]["name"]
    return parsed_by(JsonOutputKeyToolsParser(key_name=name, first_tool_only=True), bound, include_raw)


def parsed_by(
    reader: BaseOutputParser[Any], bound: Runnable[LanguageModelInput, AIMessage], include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """Put a parser behind a chat model, for answers that are whole."""
    parser = RunnableGenerator(whole, awhole) | reader
    if not include_raw:
        return bound | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def whole(messages: Iterator[AIMessage]) -> Iterator[AIMessage]:
    """Pass an answer on, unless it was cut off: what parses of half an object is not what was asked for."""
    for message in messages:
        _refuse_cut(message)
        yield message


async def awhole(messages: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    """Pass an answer on like `whole`."""
    async for message in messages:
        _refuse_cut(message)
        yield message


def _refuse_cut(message: AIMessage) -> None:
    reason = message.response_metadata.get("finish_reason")
    if reason not in (None, "end"):  # None stands in pieces of a stream but the last
        raise OutputParserException(f"the answer was cut off before its JSON was whole: {CUT.get(reason, reason)}")
