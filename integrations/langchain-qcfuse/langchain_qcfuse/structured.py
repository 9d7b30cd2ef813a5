"""Answers that are objects of a schema."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass


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
    parser = RunnableGenerator(whole, awhole) | (
        PydanticOutputParser(pydantic_object=schema) if typed else JsonOutputParser()
    )
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
    if message.response_metadata.get("finish_reason") == "length":
        raise OutputParserException("the answer was cut off before its JSON was whole: raise max_tokens")
