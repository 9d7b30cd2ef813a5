"""Bodies are counted before they are parsed, and no list of errors is longer than its parsing."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from qcfuse_rag.errors import InvalidSetting
from qcfuse_rag.server import auth_middleware
from qcfuse_rag.server.app import make_app
from qcfuse_rag.server.auth_middleware import UNCOUNTED_BYTES
from qcfuse_rag.server.bodies import MAX_TOKENS, TOKEN, parse_body
from qcfuse_rag.server.documents import AddRequest
from qcfuse_rag.server.protocol.chat_request import ChatRequest
from tests.server.test_refusals import PATH, FixedBackend
from tests.support.serving import ASKED, JSON, ask, client, error

TEXTS = st.text('a"\\,[]{}:\n\t\u20ac\U0001f680', max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)


def slow_count(value: Any) -> int:
    """Count value by value."""
    if isinstance(value, str):
        return 1
    if not isinstance(value, dict | list):
        return 0
    inside = [*value, *value.values()] if isinstance(value, dict) else value
    return 1 + max(0, len(value) - 1) + sum(map(slow_count, inside))


@given(value=VALUES, ascii_only=st.booleans(), indent=st.none() | st.integers(1, 3))
def test_the_count_is_that_of_the_values(value: Any, ascii_only: bool, indent: int | None) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert len(TOKEN.findall(body)) == slow_count(value)


def test_what_text_contains_does_not_count() -> None:
    body = {**ASKED, "messages": [{"role": "user", "content": '[{"a", \\"b\\"}]' * 2 * MAX_TOKENS}]}
    assert parse_body(json.dumps(body).encode(), ChatRequest).messages[0].text.startswith('[{"a"')


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_as_many_values_as_allowed_are_read_and_no_more(encoding: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "x": [0]}
    body["x"] *= 1 + MAX_TOKENS - slow_count(body)  # type: ignore[operator]
    assert parse_body(json.dumps(body).encode(encoding), ChatRequest)
    body["x"].append(0)  # type: ignore[attr-defined]
    with pytest.raises(InvalidSetting, match="more than 50,000 strings, commas and opening brackets"):
        parse_body(json.dumps(body).encode(encoding), ChatRequest)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_no_other_encoding_hides_values(encoding: str) -> None:
    """In UTF-16 the bytes of a quotation mark may be half a character."""
    body = '{"messages": [{"role": "user", "content": "\u2200"}], "x": [' + "1," * MAX_TOKENS + "1]}"
    with pytest.raises(InvalidSetting):
        parse_body(body.encode(encoding), ChatRequest)


MANY_WRONG: list[Any] = [3] * 20_000


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": MANY_WRONG}),
        (ChatRequest, {"messages": [{"role": "user", "content": MANY_WRONG}]}),
        (ChatRequest, {"messages": [{"role": "user", "tool_calls": MANY_WRONG}]}),
        (ChatRequest, {"messages": [{"role": "user"}], "documents": MANY_WRONG}),
        (ChatRequest, {"messages": [{"role": "user"}], "stop": MANY_WRONG}),
        (ChatRequest, {"messages": [{"role": "user"}], "tools": MANY_WRONG}),
        (AddRequest, {"documents": MANY_WRONG}),
    ],
)
def test_a_list_is_read_up_to_its_first_error(kind: type[ChatRequest | AddRequest], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate_json(json.dumps(body))
    assert 1 <= len(refused.value.errors()) <= 3  # one for each type that the field may have


async def test_bodies_that_are_held_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones pass; the bytes of an answered or refused one count no more."""
    monkeypatch.setattr(auth_middleware, "MAX_ALL_BODIES_BYTES", 100_000)
    long = json.dumps({**ASKED, "user": "x" * (UNCOUNTED_BYTES + 60_000)}).encode()
    go_on = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield long[:-1]
        await go_on.wait()
        yield long[-1:]

    async def post(http: httpx.AsyncClient, body: bytes | AsyncIterator[bytes]) -> httpx.Response:
        return await http.post(PATH, content=body, headers=JSON)

    async with client(make_app(FixedBackend())) as http:
        for _ in range(3):
            go_on.clear()
            first = asyncio.create_task(post(http, slowly()))
            await asyncio.sleep(0.05)
            second = await post(http, long)
            assert (second.status_code, second.headers["retry-after"]) == (429, "1")
            assert "other requests have long bodies already" in error(second)
            assert (await ask(http)).status_code == 200
            go_on.set()
            assert (await first).status_code == 200
            assert (await post(http, long)).status_code == 200


@pytest.mark.slow
async def test_what_was_loaded_is_not_collected_again_while_serving() -> None:
    app = make_app(FixedBackend())
    gc.unfreeze()  # what was there when the tests began
    async with app.router.lifespan_context(app):
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0
    gc.freeze()
