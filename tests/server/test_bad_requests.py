"""Requests that say what the server cannot do: one clear error each, which names the field."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest

from qcfuse_rag import FusionEngine, MemoryStore
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES
from tests.support.serving import ASKED, JSON, ask, error, post
from tests.support.tool_templates import LOOK_UP, tool_model


@pytest.fixture(scope="module")
def engine() -> FusionEngine:
    return make_engine(tool_model(), MemoryStore())


@pytest.fixture
def limits() -> dict[str, Any]:
    return {"most_tokens": 60}


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def schema(wanted: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": wanted}}}


def nested(inner: Any, depth: int, key: str) -> Any:
    for _ in range(depth):
        inner = {key: inner}
    return inner


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


IMAGE = user([{"type": "image_url"}])

TYPES_AND_RANGES = [
    ({"messages": []}, "messages: List should have at least 1 item"),
    ({"messages": "x"}, "messages: Input should be a valid array"),
    (IMAGE, "the model reads text; describe parts of other types, or leave them out: image_url"),
    (user([{"type": "input_audio"}]), "or leave them out: input_audio"),
    (user([{"type": "text", "text": 7}]), "messages.0.content.0.text: Input should be a valid string"),
    ({"logprobs": "many"}, "logprobs: Input should be a valid boolean"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: Input should be less"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3.0}, "presence_penalty"),
    ({"max_tokens": True}, "max_tokens: Input should be a valid integer"),
    ({"temperature": 1e308}, "temperature: Input should be less"),
    ({"temperature": -1}, "temperature: Input should be greater"),
    ({"seed": 2**63}, "seed: Input should be less than"),
    ({"n": 9, "temperature": 1}, "less than or equal to 8"),
    ({"n": 0}, "greater than or equal to 1"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs: Input should be an object"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [{}]}, "tools.0.function: Field required"),
    ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "tool_calls.0"),
    ({"documents": ["\ud800"]}, "the body is not JSON"),
]
UNSUPPORTED = {
    "json_schema": {"type": "object"},
    "grammar": 'root ::= "a"',
    "suffix": "x",
    "guided_json": {"type": "object"},
    "structured_outputs": {"regex": "a+"},
    "stop_token_ids": [2],
    "min_tokens": 5,
    "ignore_eos": True,
    "best_of": 2,
    "functions": [LOOK_UP["function"]],
    "function_call": {"name": "look_up"},
    "truncate_prompt_tokens": 9,
    "add_generation_prompt": False,
    "modalities": ["text", "audio"],
}
REFUSED = [
    ({"top_logprobs": 5}, "top_logprobs needs logprobs"),
    ({"stop": ["x"] * 17}, "at most 16 strings"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias names token 99999999"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs cannot set enable_thinking"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs cannot set tools"),
    ({"reasoning_effort": "high"}, "reads no reasoning_effort"),
    (user("x" * 2_000_000), "tokens exceeds the context window"),
    (user("x " * 9000), "context window"),
    ({"messages": [{"role": "system", "content": "x"}]}, "documents need a user's message"),
    ({"documents": ["x"] * 257}, "documents has 257 entries, and at most 256"),
    ({"tool_choice": "required"}, "there are no tools to call"),
    (
        {"tools": [function(name="f", parameters={"$defs": 5, "$ref": "#/$defs/x"})], "tool_choice": "required"},
        "cannot answer by this grammar: ",
    ),
    ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format has to be"),
    ({"tools": [LOOK_UP], "tool_choice": {"type": "any"}}, "tool_choice names None"),
    (
        {"tools": [LOOK_UP], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "sink"}]}},
        "tool_choice names 'sink', which is not among the given tools: look_up",
    ),
    (schema("x"), "response_format has to be"),
    (
        schema({"type": "cough"}),
        "cannot answer by this grammar: at 1(8): failed to compile JSON schema: Invalid type: cough",
    ),
    (schema({"anyOf": 5}), "anyOf must be an array"),
    (schema({"properties": {"x": {"prefixItems": 5}}}), "prefixItems must be an array"),
    (schema(nested({"type": "object"}, 150, "items")), "at most 100 levels"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *TYPES_AND_RANGES,
        *REFUSED,
        *(({name: value}, f"{name} is not supported") for name, value in UNSUPPORTED.items()),
    ],
)
async def test_chat_requests(http: httpx.AsyncClient, changes: dict[str, Any], message: str) -> None:
    response = await ask(http, **changes)
    assert (response.status_code, message in error(response)) == (400, True), response.text
    assert "\n" not in error(response)


LONG, USER = user("x " * 4090), ASKED["messages"][0]
CODES = [
    (LONG, "context_length_exceeded", "messages"),
    ({**LONG, "stream": True}, "context_length_exceeded", "messages"),
    (
        {"messages": [{"role": "system", "content": "x " * 9000}, *ASKED["messages"]]},
        "context_length_exceeded",
        "messages",
    ),
    ({"documents": ["x " * 4090] * 2}, "context_length_exceeded", "messages"),
    ({"messages": None}, "invalid_type", "messages"),
    ({"messages": [{"content": "x"}]}, "missing_required_parameter", "messages.0.role"),
    (user(7), "invalid_type", "messages.0.content"),
    (user([7]), "invalid_type", "messages.0.content.0"),
    ({"logit_bias": {" ferry": 1}}, "invalid_value", "logit_bias. ferry"),
    ({"top_k": -2}, "invalid_value", "top_k"),
    ({"min_tokens": 5}, "unsupported_parameter", "min_tokens"),
    ({"logit_bias": {"99999999": 1}}, "invalid_value", "logit_bias"),
    ({"response_format": {"type": "yaml"}}, "invalid_value", "response_format"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"reasoning_effort": "high"}, "unsupported_parameter", "reasoning_effort"),
]


@pytest.mark.parametrize(("changes", "code", "param"), CODES)
async def test_errors_have_openais_codes(
    http: httpx.AsyncClient, changes: dict[str, Any], code: str, param: str
) -> None:
    response = await ask(http, **{"documents": None, **changes})
    told = response.json()["error"]
    assert (response.status_code, told["type"], told["code"]) == (400, "invalid_request_error", code)
    assert told["param"] == param
    assert ("exceeds the context window" in told["message"]) == (code == "context_length_exceeded")


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    ("asked", "given", "reason"),
    [
        ({"max_tokens": 61}, 60, "this server gives no more"),
        ({"max_tokens": 10**12}, None, "no more fit the context window"),
        ({"max_tokens": 60}, 60, None),
    ],
)
async def test_long_answers_are_cut_to_what_fits(
    http: httpx.AsyncClient,
    engine: FusionEngine,
    path: str,
    asked: dict[str, Any],
    given: int | None,
    reason: str | None,
) -> None:
    """A prompt and a bias that leave a known number of tokens to an answer that never ends."""
    length = 2025 if given is None else 10
    prompt = {"messages": user("x " * length)["messages"]} if path[:4] == "chat" else {"prompt": "x " * length}
    bias = {str(engine.lm.tokenizer("x")["input_ids"][-1]): 100}
    body = (await post(http, path, **prompt, **asked, logit_bias=bias)).json()
    usage, window = body["usage"], engine.lm.context_window.tokens
    assert usage["completion_tokens"] == (given or window - usage["prompt_tokens"])
    assert body["choices"][0]["finish_reason"] == "length"
    cut = f"the answer may have {usage['completion_tokens']:,} tokens instead of {asked['max_tokens']:,}: {reason}"
    assert body["fusion"]["answer_limit"] == (reason and cut)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt has no text"),
        ({"prompt": ""}, "prompt has no text"),
        ({"prompt": ["x", ""]}, "prompt has no text"),
        ({"prompt": [1, 2, 3]}, "token ids are not supported"),
        ({"prompt": [[1, 2], [3]]}, "token ids are not supported"),
        ({"prompt": ["x"] * 9}, "9 prompts with 1 answers each, and a request gets at most 8 answers"),
        ({"prompt": "x" * 2_000_000}, "context window"),
        ({"echo": True}, "echo is not supported"),
        ({"documents": PASSAGES}, "documents is a field of /v1/chat/completions"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages is a field of /v1/chat/completions"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
async def test_text_completions(http: httpx.AsyncClient, changes: dict[str, Any], message: str) -> None:
    response = await post(http, "completions", **{"prompt": "x", "max_tokens": 1, **changes})
    assert (response.status_code, message in error(response)) == (400, True), response.text


async def test_another_model(http: httpx.AsyncClient) -> None:
    for response in (await ask(http, model="gpt-4"), await post(http, "completions", prompt="x", model="gpt-4")):
        assert (response.status_code, error(response)) == (404, "no model 'gpt-4' here; there is 'tiny'")


@pytest.mark.parametrize(("depth", "status"), [(80, 200), (120, 400), (480, 400), (100_000, 400)])
async def test_bodies_are_as_deep_as_any_part_of_this_can_take(
    http: httpx.AsyncClient, depth: int, status: int
) -> None:
    """Searching messages for passages and sending them with Ray have depth limits of their own."""
    body = json.dumps({"messages": [{"role": "user", "content": "x", "more": "deep"}], "max_tokens": 1})
    deep = body.replace('"deep"', "[" * depth + "]" * depth)
    assert (await http.post("/v1/chat/completions", content=deep, headers=JSON)).status_code == status


TEXT = {"type": "text", "text": "x"}
CALL = {"name": "f", "arguments": '{"a": 1}'}
NEUTRAL: list[dict[str, Any]] = [
    {"tools": [], "tool_choice": "auto"},
    {"tools": None, "tool_choice": "none", "parallel_tool_calls": False},
    {"response_format": {"type": "text"}},
    {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k"},
    {"timings_per_token": True, "return_progress": True, "cache_prompt": False, "id_slot": 0},  # llama-server's
]
BROKEN_CALLS = ['{"city": "Os', '{"a":1,}', " ", None, "null", "", "[1]", "[" * 100_000]


def called(**call: Any) -> dict[str, Any]:
    """Return a conversation with a call and its result."""
    result = {"role": "tool", "tool_call_id": "1", "content": "x"}
    return {"messages": [USER, {"role": "assistant", "content": None, **call}, result, USER]}


@pytest.mark.parametrize(
    ("changes", "alike"),
    [
        (user([{"type": "input_text", "text": "x"}]), user("x")),
        (user([TEXT, {"type": "output_text", "text": "y", "annotations": []}]), user("xy")),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, USER]},
            {"messages": [{"role": "assistant", "content": "No."}, USER]},
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "refusal": "No."}, USER]},
            {"messages": [{"role": "assistant", "content": "No."}, USER]},
        ),
        (called(function_call=CALL), called(tool_calls=[{"function": CALL}])),
        (
            {"messages": [{"role": "developer", "content": "x"}, USER]},
            {"messages": [{"role": "system", "content": "x"}, USER]},
        ),
        *((neutral, {}) for neutral in NEUTRAL),
        ({"stop": ""}, {}),
        ({"stop": ["", "qq"]}, {"stop": "qq"}),
        ({"top_p": 0, "temperature": 1}, {"temperature": 0}),
        ({"response_format": {"type": "json_object", "schema": None}}, {"response_format": {"type": "json_object"}}),
        ({"n": 2}, {"n": 2, "temperature": 0}),
    ],
)
async def test_other_forms_are_taken(http: httpx.AsyncClient, changes: dict[str, Any], alike: dict[str, Any]) -> None:
    first, second = [(await ask(http, **{"documents": None, **form})).json() for form in (changes, alike)]
    assert first["choices"] == second["choices"]
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
    assert len(first["choices"]) == changes.get("n", 1)
    assert first["choices"][0] == {**first["choices"][-1], "index": 0}
    assert first["system_fingerprint"].startswith("fp_")


@pytest.mark.parametrize("arguments", BROKEN_CALLS)
async def test_broken_calls_of_earlier_turns_do_not_end_a_conversation(
    http: httpx.AsyncClient, arguments: str | None
) -> None:
    called = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}
    messages = [USER, called, {"role": "tool", "tool_call_id": "1", "content": "x"}, USER]
    response = await ask(http, messages=messages, documents=None, max_tokens=1)
    assert (response.status_code == 200) == (arguments is None or len(arguments) < 1000), response.text


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
async def test_compressed_bodies_are_refused(http: httpx.AsyncClient, encoding: str) -> None:
    body, headers = gzip.compress(json.dumps(ASKED).encode()), {**JSON, "content-encoding": encoding}
    response = await http.post("/v1/chat/completions", content=body, headers=headers)
    assert (response.status_code, response.headers["accept-encoding"]) == (415, "identity")
    assert "without Content-Encoding" in error(response)


@pytest.mark.parametrize("content_type", ["text/plain", "", "application/x-www-form-urlencoded", "application/jsonp"])
async def test_only_json_is_read(http: httpx.AsyncClient, content_type: str) -> None:
    """A web page may send plain text to any address, but JSON only where it is allowed to."""
    response = await http.post("/v1/chat/completions", content=b"{}", headers={"content-type": content_type})
    assert (response.status_code, "application/json" in error(response)) == (400, True)
