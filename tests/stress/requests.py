"""Requests made to do harm: a valid one, changed somewhere, as bytes that are sent to a server."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tests.support.passages import PASSAGES, QUESTION

PATH = "/v1/chat/completions"
MOST_CHARACTERS = 1_000_000
MOST_BODY_BYTES = 8 << 20
MOST_LEVELS = 8

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
VALID: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "nothing", "tool_call_id": "a"},
        {"role": "user", "content": QUESTION},
    ],
    "documents": PASSAGES,
    "max_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 3,
    "stop": ["\n\n"],
    "stream": False,
    "stream_options": {"include_usage": True},
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "parallel_tool_calls": False,
    "n": 1,
    "fidelity": "fast",
}
VALID_BODIES: dict[str, dict[str, Any]] = {
    PATH: VALID,
    "/v1/completions": {"prompt": [QUESTION, PASSAGES[0]], "max_tokens": 2, "logprobs": 2, "stream": False},
    "/v1/embeddings": {"input": [QUESTION, PASSAGES[0]], "encoding_format": "float"},
}
REQUIRED = ("messages", "prompt", "input")
TEXTS = (
    "",
    " ",
    "ferry ",
    "x",
    "\u6f22",
    "\U0001f680",
    "\u202e",
    "\x1b]52;c;AA==\x07",
    "\0",
    "<|im_end|>",
    "a.",
    "\ud800",
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1e308,
    10**30,
    float("nan"),
    -float("inf"),
    "",
    "x",
    [],
    {},
    [[]],
    {"": None},
)
FIELDS = (
    "logprobs",
    "top_logprobs",
    "n",
    "prompt",
    "top_k",
    "functions",
    "audio",
    "guided_regex",
    "min_p",
    "echo",
    "chat_template",
    "user",
    "__proto__",
)


def request(rng: random.Random) -> bytes:
    """Return the bytes of a request: its body is changed in one of many ways, and sometimes its head."""
    path = rng.choices(list(VALID_BODIES), (8, 1, 1))[0]
    return _head(rng, _changed_body(rng, VALID_BODIES[path]), path)


def _changed_body(rng: random.Random, valid: dict[str, Any]) -> bytes:
    body = _copied({name: value for name, value in valid.items() if name in REQUIRED or rng.random() < 0.5})
    body.setdefault("max_tokens", 2)
    changes = rng.choices(list(CHANGES), list(CHANGES.values()), k=rng.choice((1, 1, 2)))
    for change in changes:
        change(rng, body)
    if rng.random() < 0.98 and isinstance(body.get("max_tokens"), int):
        body["max_tokens"] = min(body["max_tokens"], 4)
    text = json.dumps(body).encode()
    return _damaged(rng, text) if rng.random() < 0.15 else text


def _copied(value: Any) -> Any:
    """Return a value of which no part is shared, as it will be changed."""
    return json.loads(json.dumps(value))


def _places(body: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return the container and key or index of everything that is at most `MOST_LEVELS` deep in a body."""
    places, level = list[tuple[Any, Any]](), [body]
    for _ in range(MOST_LEVELS):
        inside = [
            (container, key)
            for container in level
            if isinstance(container, dict | list)
            for key in (container if isinstance(container, dict) else range(len(container)))
        ]
        places += inside
        level = [container[key] for container, key in inside]
    return places


def _set(rng: random.Random, body: dict[str, Any], value: Any) -> None:
    container, key = rng.choice(_places(body) or [(body, "messages")])
    container[key] = value


def _text(rng: random.Random, most: int) -> str:
    size = int(10 ** rng.uniform(0, len(str(most)) - 1))
    word = rng.choice(TEXTS) or "y"
    return (word * (size // len(word) + 1))[:size]


def _nested(rng: random.Random) -> Any:
    value: Any = "deep"
    for _ in range(rng.choice((5, 99, 101, 500, 900))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def _schema(rng: random.Random) -> dict[str, Any]:
    kinds = ("object", "array", "string", "number", "nonsense")
    schema: dict[str, Any] = {"type": rng.choice(kinds), "properties": {_text(rng, 100): _nested(rng)}}
    schema["enum"] = [_text(rng, 100) for _ in range(rng.randrange(50))] or None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


CHANGES: dict[Callable[[random.Random, dict[str, Any]], object], int] = {
    lambda rng, body: None: 10,
    lambda rng, body: _set(rng, body, rng.choice(VALUES)): 30,
    lambda rng, body: _set(rng, body, _text(rng, 10_000)): 20,
    lambda rng, body: _set(rng, body, _text(rng, MOST_CHARACTERS)): 6,
    lambda rng, body: _set(rng, body, _nested(rng)): 8,
    lambda rng, body: body.update({rng.choice(FIELDS): rng.choice(VALUES)}): 8,
    lambda rng, body: body.update(documents=[_text(rng, 1000) for _ in range(rng.choice((1, 50, 256, 257)))]): 6,
    lambda rng, body: body.update(messages=_copied(VALID["messages"] * rng.choice((2, 20, 200)))): 4,
    lambda rng, body: body.update(tools=_copied([TOOL] * rng.choice((2, 20, 200)))): 4,
    lambda rng, body: body.update(response_format=_schema(rng)): 8,
    lambda rng, body: body.update(stream=True): 10,
    lambda rng, body: body.pop(rng.choice(list(body)), None): 8,
}
"""Ways to change a body, with weights."""


def _filled(start: str, unit: str, end: str) -> Callable[[], bytes]:
    """Return what makes a body of the largest size that is read, filled with units."""
    count = (MOST_BODY_BYTES - len(start) - len(end)) // len(unit.encode())
    return lambda: f"{start}{unit * count}{end}".encode()


MESSAGE = '{"messages": [{"role": "user", "content": "x"}], '
HEAVY_BODIES: dict[str, Callable[[], bytes]] = {
    "text": _filled(MESSAGE + '"user": "', "abc ", '"}'),
    "escapes": _filled(MESSAGE + '"user": "', "\\u00e9", '"}'),
    "long question": _filled('{"messages": [{"role": "user", "content": "', "\U0001f680", '"}]}'),
    "spaces": _filled(MESSAGE, " ", '"user": ""}'),
    "numbers of no field": _filled(MESSAGE + '"x": [', "0.5,", "1]}"),
    "lists of no field": _filled(MESSAGE + '"x": [', "[],", "1]}"),
    "digits": _filled(MESSAGE + '"seed": ', "1", "}"),
    "messages": _filled('{"messages": [', '{"role":"user","content":"x"},', '{"role":"user","content":"x"}]}'),
    "numbers as messages": _filled('{"messages": [', "1,", "1]}"),
    "numbers as parts": _filled('{"messages": [{"role": "user", "content": [', "1,", "1]}]}"),
    "numbers as documents": _filled(MESSAGE + '"documents": [', "1,", "1]}"),
    "numbers as stops": _filled(MESSAGE + '"stop": [', "1,", "1]}"),
    "tools": _filled(MESSAGE + '"tools": [', '{"function":{"name":"f"}},', '{"function":{"name":"f"}}]}'),
    "choices of a schema": _filled(
        MESSAGE + '"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [', '"a",', '"a"]}}}}'
    ),
    "no end": _filled("", '{"a":[', ""),
    "quotes of no string": _filled(MESSAGE, '\\"', ""),
}
"""Functions that make bodies of the largest accepted size, by the name of their content."""


def whole_request(body: bytes) -> bytes:
    """Return a request with this body, as bytes."""
    lines = [f"POST {PATH} HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Connection: close"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def _damaged(rng: random.Random, text: bytes) -> bytes:
    """Return bytes that are most likely no JSON any more."""
    at = rng.randrange(len(text))
    return rng.choice(
        (
            text[:at],
            text[:at] + rng.randbytes(rng.randrange(1, 20)) + text[at:],
            text[:at] + b"\0" + text[at + 1 :],
            b"\xff\xfe" + text,
            b"\xef\xbb\xbf" + text,
            rng.randbytes(min(at, 10_000)),
            b"[" * (at * 100),
            b'{"a":' * (at * 10),
            b"1" * (at * 20),
            text + text,
        )
    )


def _head(rng: random.Random, body: bytes, path: str) -> bytes:
    """Return a request with this body; one in ten has a head that is not as it should be."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Connection: close"]
    length = f"Content-Length: {len(body)}"
    if rng.random() < 0.1:
        odd = rng.randrange(9)
        if odd == 0:
            body, length = (
                b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n",
                "Transfer-Encoding: chunked",
            )
        elif odd == 1:
            lines[0] = f"{rng.choice(('GET', 'PUT', 'DELETE', 'HEAD', 'X'))} {PATH} HTTP/1.1"
        elif odd == 2:
            lines[0] = f"POST {rng.choice(('/', '/healthz', '/v1/models/..%2f', '/v1/' + 'x' * 5000, '*'))} HTTP/1.1"
        elif odd == 3:
            lines[2] = (
                f"Content-Type: {rng.choice(('text/plain', '', 'application/x-www-form-urlencoded', 'x' * 9000))}"
            )
        elif odd == 4:
            length = f"Content-Length: {rng.choice(('-1', 'x', '1e3', '99999999999999999999', '9000000'))}"
        elif odd == 5:
            lines.append("Transfer-Encoding: chunked")
        elif odd == 6:
            lines.append(rng.choice(("Host: other", "Authorization: a\r\nAuthorization: b", "Content-Type: text/html")))
        elif odd == 7:
            lines.append("X-Long: " + "x" * rng.choice((1000, 100_000)))
        else:
            lines[0] = rng.choice(("", "POST", f"POST {PATH} HTTP/9.9", "\x16\x03\x01", f"POST {PATH}"))
    return "\r\n".join([*lines, length, "", ""]).encode("latin-1") + body
