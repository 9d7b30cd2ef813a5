"""Entries with headers of our own making, whose checksums are right."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.store.entry.codec import MAGIC, PREAMBLE, VERSION, Preamble, _header_checksum, encode, read_header
from qcfuse_rag.store.entry.header import DTYPES
from qcfuse_rag.store.testing import example_key, example_patch
from tests.stress.content import chunk_of

ENTRIES = [encode(example_key(number), chunk_of(number, numbers)) for number in (1, 3) for numbers in ("model", "int8")]
ENTRIES += [encode(example_key(number), example_patch(number, n_tokens=40 * number)) for number in (1, 3)]
HONEST = [json.loads(bytes(parts[1])) for parts in ENTRIES]
BODIES = [b"".join(bytes(part) for part in parts[3:]) for parts in ENTRIES]
LARGEST_BODY = 1 << 20

Path = tuple[str | int, ...]


def entry(header: bytes, body: bytes = b"", *, version: int = VERSION, flags: int = 0) -> bytes:
    """Return an entry with a header that passes its checksum; the body is cut or filled up to what the header says."""
    preamble = PREAMBLE.pack(MAGIC, version, flags, len(header), _header_checksum(flags, bytes(32), header), bytes(32))
    start = -(-(len(preamble) + len(header)) // 4096) * 4096
    try:
        size = read_header(Preamble.parse(preamble), header, None)[0].size
        body = body[: size - start].ljust(min(size - start, LARGEST_BODY), b"\0")
    except CorruptEntry:
        pass
    return (preamble + header).ljust(start, b"\0") + body


def nested(depth: int, around: Any = 0) -> Any:
    """Return lists in lists."""
    for _ in range(depth):
        around = [around]
    return around


NUMBERS = (0, -1, 1, 2, 3, 127, 128, 129, 4096, 1 << 31, (1 << 31) - 1, 1 << 63, 10**400, -(10**30), 1.0, 1e308, -0.0)
WORDS = ("", "model", "int8", "fp8", "ranking", "key.0", "value.0", "key.0.scale", "\ud800", "\0", "x" * 5000, *DTYPES)
WORDS += ("rank4", "rank64", "inter", "key.0.basis", "context", "facts", "extras", "0" * 32)
JUNK: SearchStrategy[Any] = st.one_of(
    st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.integers() | st.floats(),
    st.sampled_from(WORDS) | st.text(max_size=20),
    st.integers(0, 900).map(nested),
    st.lists(st.sampled_from(NUMBERS), max_size=5) | st.integers(0, 50_000).map(lambda count: [0] * count),
    st.dictionaries(st.sampled_from(WORDS), st.sampled_from(NUMBERS), max_size=3),
)


@st.composite
def forged(draw: DrawFn) -> bytes:
    """Draw an entry whose header is an honest one with a few things changed."""
    which = draw(st.integers(0, len(HONEST) - 1))
    header = copy.deepcopy(HONEST[which])
    for _ in range(draw(st.integers(1, 4))):
        header = _changed(draw, header)
    text = json.dumps(header).encode()
    if draw(st.integers(0, 9)) == 0:  # JSON itself: cut, or spliced with anything
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.binary(max_size=8)) + text[at + draw(st.integers(0, 8)) :]
    return entry(text, BODIES[which], flags=draw(st.sampled_from((0, 0, 0, 0, 0, 0, 0, 1))))


def _changed(draw: DrawFn, header: Any) -> Any:
    """Change, drop, repeat or exchange a node of a header."""
    paths = list(_paths(header))
    if not paths:
        return draw(JUNK)
    # A block's parts are most of a header; the parts of the header itself come as often as those of all blocks.
    short = [path for path in paths if len(path) <= 2] or paths
    path = draw(st.sampled_from(short) | st.sampled_from(paths))
    parent, last = _at(header, path[:-1]), path[-1]
    what = draw(st.sampled_from(("junk", "junk", "number", "word", "drop", "repeat", "exchange")))
    if what == "drop":
        del parent[last]
    elif what == "repeat" and isinstance(parent, list):
        parent.insert(draw(st.integers(0, len(parent))), copy.deepcopy(parent[last]))
    elif what == "exchange":
        other = draw(st.sampled_from(paths))
        parent[last] = copy.deepcopy(_at(header, other))
    else:
        choice = {"number": st.sampled_from(NUMBERS), "word": st.sampled_from(WORDS)}.get(what, JUNK)
        parent[last] = draw(choice)
    return header


def _paths(node: Any, path: Path = ()) -> list[Path]:
    found = [path] if path else []
    children = node.items() if isinstance(node, dict) else enumerate(node[:50]) if isinstance(node, list) else ()
    for name, child in children:
        if len(path) < 5:
            found += _paths(child, (*path, name))
    return found


def _at(node: Any, path: Path) -> Any:
    for step in path:
        node = node[step]
    return node
