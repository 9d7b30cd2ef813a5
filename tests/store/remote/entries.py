"""An entry as bytes in a remote."""

from __future__ import annotations

from qcfuse_rag.store.entry.codec import encode
from qcfuse_rag.store.testing import example_chunk, example_key

SECRET = bytes(range(32))

ENTRY = b"".join(encode(example_key(), example_chunk()))

NAME = f"{example_key().address}.kv"
