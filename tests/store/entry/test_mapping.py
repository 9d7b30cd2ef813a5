"""Mapped entries hold memory as long as it is used, and no descriptor."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from qcfuse_rag import DiskStore
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.entry.codec import MADV_POPULATE_READ, PrivateMapping
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.disk.folders import SECRET, put

HELD, SPARE_DESCRIPTORS = 100, 20


@contextmanager
def few_descriptors() -> Iterator[None]:
    """Let the process open a few more files than it has open, and no more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + SPARE_DESCRIPTORS
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
@pytest.mark.parametrize("cipher", [None, StoreCipher(SECRET)], ids=["plain", "encrypted"])
@pytest.mark.parametrize("read_first", [False, True])
def test_more_chunks_are_held_than_files_may_be_open(
    tmp_path: Path, cipher: StoreCipher | None, read_first: bool
) -> None:
    with DiskStore(tmp_path, cipher=cipher) as store:
        put(store, *range(HELD))
        with few_descriptors():
            held = [store.get(example_key(number)) for number in range(HELD)]
            for chunk in held if read_first else ():
                assert isinstance(chunk, ChunkKV)
                chunk.read()
            put(store, HELD)
            for number, chunk in enumerate(held):
                assert isinstance(chunk, ChunkKV)
                assert_same(chunk, example_chunk(number))


def mappings_of(path: Path) -> int:
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_memory_is_mapped_as_long_as_a_part_of_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    with path.open("rb") as file:
        mapping = PrivateMapping(file.fileno(), path.stat().st_size)
    tensor = torch.frombuffer(mapping.view[256:512], dtype=torch.uint8)[10:20]
    path.unlink()
    del mapping
    gc.collect()
    assert mappings_of(path) == 1
    assert tensor.tolist() == list(range(10, 20))
    del tensor
    assert mappings_of(path) == 0


def test_changes_stay_in_this_process(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"unchanged")
    with path.open("rb") as file:
        mapping = PrivateMapping(file.fileno(), 9)
    mapping.view[:2] = b"to"
    assert (bytes(mapping.view), path.read_bytes()) == (b"tochanged", b"unchanged")


def test_what_the_system_refuses_is_an_error_with_its_number(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        PrivateMapping(12_345, 4096)
    path = tmp_path / "file"
    path.write_bytes(b"text")
    with path.open("rb") as file:
        mapping = PrivateMapping(file.fileno(), 4)
        with pytest.raises(OSError, match="Invalid argument"):
            mapping.advise(MADV_POPULATE_READ, 1, 4)
