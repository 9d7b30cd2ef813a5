"""Whoever writes an entry's header, even one whose checksums are right: it is refused for what it is, and at once."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.store.chunk import block_names
from qcfuse_rag.store.entry.codec import MAGIC, MAX_HEADER_BYTES, PREAMBLE, VERSION
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.entry.reader import BytesInMemory, open_chunk
from tests.stress.bounds import bounded
from tests.stress.campaign import Tally, sized
from tests.stress.forgery import BODIES, HONEST, entry, forged, nested

MEMORY_BYTES = 64 << 20
CPU_S = 5.0
FUZZ = settings(max_examples=sized(300, 12_000), deadline=None, database=None, suppress_health_check=list(HealthCheck))
START = PREAMBLE.pack(MAGIC, VERSION, 0, 100, 0, bytes(32))


def examine(data: bytes, tally: Tally, cipher: StoreCipher | None = None, *, memory_bytes: int = MEMORY_BYTES) -> None:
    """Open an entry and read all of it, within bounds; anything but `CorruptEntry` comes out."""
    tally.trials += 1
    with bounded(memory_bytes=memory_bytes + len(data), cpu_s=CPU_S):
        try:
            header, chunk = open_chunk(BytesInMemory(data), cipher)
            assert len(header.key.address) >= 32
            assert chunk.expired in (True, False)
            tally.note("headers believed")
            chunk.read()
            tally.reads += 1
        except CorruptEntry as error:
            tally.note("refused" if len(str(error)) < 1000 else "refused at too great length")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_random_bytes_are_refused() -> None:
    tally = Tally("random bytes, alone, behind the magic, or for a header")
    anything = st.binary(max_size=300)
    behind = [anything, anything.map(lambda b: MAGIC + b), anything.map(lambda b: START[:16] + b), anything.map(entry)]

    @FUZZ
    @given(st.one_of(behind), st.sampled_from((None, StoreCipher(bytes(16)))))
    def fuzz(data: bytes, cipher: StoreCipher | None) -> None:
        examine(data, tally, cipher)

    fuzz()
    assert tally.notes == {"refused": tally.trials}
    tally.finish()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_forged_headers_are_refused_or_read_within_bounds() -> None:
    tally = Tally("forged headers with checksums that are right")

    @FUZZ
    @given(forged())
    def fuzz(data: bytes) -> None:
        examine(data, tally)

    fuzz()
    assert tally.notes["headers believed"] > 0, "nothing got as far as the blocks"
    assert "refused at too great length" not in tally.notes, "reasons are for people"
    tally.finish()


def claims(layers: int, blocks: list[object], probe_layers: list[int] | None = None, numbers: str = "model") -> bytes:
    """Return an honest header that claims far more than there is."""
    about = {**HONEST[0], "layers": layers, "blocks": blocks, "probe_layers": probe_layers or [], "numbers": numbers}
    return json.dumps(about, separators=(",", ":")).encode()


def said(**changes: object) -> bytes:
    """Return an honest header but for some fields."""
    return json.dumps({**HONEST[0], **changes}).encode()


BOMBS: dict[str, Callable[[int], bytes]] = {
    "a block that is enormous": lambda most: said(
        blocks=[{**block, "shape": [(1 << 31) - 1] * 3} for block in HONEST[0]["blocks"]]
    ),
    "layers by the million": lambda most: claims(most // 4, [0] * (most // 4 * 2 - 999)),
    "layers in text": lambda most: said(layers=most // 4, blocks="a" * (most // 4 * 2 + 1)),
    "narrow layers": lambda most: claims(most // 8, [0] * (most // 8 * 4 - 999), numbers="int8"),
    "probe layers": lambda most: claims(most // 16, [0] * (most // 16 * 2 + 1), list(range(most // 16))),
    "the same probe layer": lambda most: claims(100, [0] * 201, [0] * (most // 2 - 999)),
    "names alone": lambda most: claims(
        most // 60, [{"name": name} for name in block_names(most // 60, "model", ())], list(range(most // 60))
    ),
    "as many objects as fit": lambda most: b"[" + b",".join([b'{"":0}'] * (most // 7 - 9)) + b"]",
    "as many lists as fit": lambda most: b"[" + b",".join([b"[[]]"] * (most // 5 - 9)) + b"]",
    "brackets": lambda most: b"[" * most,
    "as deep as JSON goes": lambda most: said(key=nested(900)),
    "digits": lambda most: b'{"tokens":' + b"9" * (most - 99) + b"}",
    "a long name of a dtype": lambda most: said(dtype="x" * (most - 9999)),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_do_not_go_off(bomb: str) -> None:
    """JSON in memory takes up to 40 times its length, 160 MB for the longest header there may be; nothing on top."""
    most = sized(1 << 19, MAX_HEADER_BYTES)
    header, tally = BOMBS[bomb](most), Tally(f"a header of up to {most / 2**20:g} MiB: {bomb}")
    assert len(header) <= most
    examine(entry(header, BODIES[0]), tally, memory_bytes=max(MEMORY_BYTES, 64 * len(header)))
    assert tally.notes == {"refused": 1}
