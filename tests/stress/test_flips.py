"""Whatever byte of an entry's file changes: it is refused, or nobody ever reads that byte."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.entry.codec import PREAMBLE, MappedFile, Preamble, open_header
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.testing import example_key
from tests.stress.campaign import Tally, sized
from tests.stress.content import chunk_of, wrong_bytes

NUMBER = 4
"""Of 300 tokens: every block has three pieces."""

UNUSED = range(20, 24)
"""Bytes of the preamble that mean nothing."""


@pytest.fixture(params=[None, StoreCipher(b"sixteen bytes or more")], ids=["plain", "encrypted"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path, cipher=request.param)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_any_flip_is_refused_or_in_padding(store: DiskStore, request: pytest.FixtureRequest) -> None:
    tally = Tally(f"one byte of an entry changed, anywhere, {request.node.callspec.id}")
    size, parts = bytes_of(store)
    flip_bytes(store, tally, sized(150, 1000), lambda rng: rng.randrange(size), {p for part in parts for p in part})
    tally.finish()


def bytes_of(store: DiskStore) -> tuple[int, list[list[int]]]:
    """Return the size of an entry's file, and where in it the bytes of preamble, header and blocks are."""
    store.put(example_key(NUMBER), chunk_of(NUMBER))
    path = store.files.path(example_key(NUMBER).address)
    header, _ = open_header(MappedFile(path), store.cipher)
    end = PREAMBLE.size + Preamble.parse(path.read_bytes()).header_bytes
    preamble = [position for position in range(PREAMBLE.size) if position not in UNUSED]
    blocks = [p for block in header.blocks for p in range(header.start + block.offset, header.start + block.end)]
    return path.stat().st_size, [preamble, list(range(PREAMBLE.size, end)), blocks]


def flip_bytes(
    store: DiskStore, tally: Tally, trials: int, choose: Callable[[random.Random], int], used: set[int]
) -> None:
    """Change one byte of the entry, read it all, and put it anew; many times."""
    rng, key = random.Random(0), example_key(NUMBER)
    for _ in range(trials):
        position, change = choose(rng), rng.randrange(1, 256)
        store.put(key, chunk_of(NUMBER))
        with open(store.files.path(key.address), "r+b") as file:
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ change]))
        tally.trials += 1
        reason, wrong = read_all(store)
        tally.reads += 1
        tally.wrong_bytes += wrong
        tally.note("refused" if reason else "read, in padding")
        if (reason is not None) != (position in used):
            tally.errors.append(f"byte {position} changed by {change}: {reason}")


def read_all(store: DiskStore) -> tuple[str | None, int]:
    """Read the entry; return why it was refused, and how many wrong bytes came of it."""
    found = store.get(example_key(NUMBER))
    if isinstance(found, Miss):
        return found.reason, 0
    try:
        return None, wrong_bytes(found, chunk_of(NUMBER))
    except CorruptEntry as error:
        store.discard(example_key(NUMBER), reason=str(error))
        return str(error), 0
