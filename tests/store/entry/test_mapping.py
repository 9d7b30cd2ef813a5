"""Mapped entries hold memory as long as it is used, and no descriptor."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path

import pytest
import torch

from qcfuse_rag import DiskStore
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.entry.codec import MappedFile
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.disk.folders import put
from tests.store.entry.entries import CIPHERS

HELD, SPARE_DESCRIPTORS = 100, 20


@pytest.mark.slow
@pytest.mark.parametrize("cipher", CIPHERS)
def test_more_chunks_are_held_than_files_may_be_open(tmp_path: Path, cipher: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with DiskStore(tmp_path, cipher=CIPHERS[cipher]) as store:
        put(store, *range(HELD))
        most = max(map(int, os.listdir("/proc/self/fd"))) + SPARE_DESCRIPTORS
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
        try:
            held = [store.get(example_key(number)) for number in range(HELD)]
            for chunk in held[::2]:
                assert isinstance(chunk, ChunkKV)
                chunk.read()
            put(store, HELD)
            for number, chunk in enumerate(held):
                assert_same(chunk, example_chunk(number))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_memory_is_mapped_as_long_as_a_part_of_it_is_used_and_changes_stay_in_it(tmp_path: Path) -> None:
    def mappings() -> int:
        return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())

    path, data = tmp_path / "file", bytes(range(256)) * 64
    path.write_bytes(data)
    tensor = torch.frombuffer(MappedFile(path).read(256, 512), dtype=torch.uint8)[10:20]
    tensor[0] = 99
    assert path.read_bytes() == data
    path.unlink()
    gc.collect()
    assert mappings() == 1
    assert tensor.tolist() == [99, *range(11, 20)]
    del tensor
    assert mappings() == 0
