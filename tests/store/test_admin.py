"""Moving and compressing entries: what cannot be read is reported, and only what is damaged is removed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qcfuse_rag import MemoryStore
from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.store.admin import ChangeReport, compress, move
from qcfuse_rag.store.testing import example_chunk, example_key


@pytest.mark.parametrize("act", [lambda store: move(store, MemoryStore()), compress])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), CorruptEntry("checksum differs")])
def test_only_damaged_entries_are_removed(
    act: Callable[[MemoryStore], ChangeReport], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    store.put(example_key(), example_chunk())

    def failing(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("qcfuse_rag.store.chunk.ChunkKV.layer", failing)
        patch.setattr(MemoryStore, "copy_of", failing)
        report = act(store)
    assert (report.done, report.missing) == (0, {example_key().address: str(error)})
    assert (example_key() in store) is isinstance(error, OSError)


def test_bytes_after_a_move_are_in_the_targets_format() -> None:
    source, target = MemoryStore(), MemoryStore(kv_dtype="int8")
    source.put(example_key(), example_chunk())
    report = move(source, target)
    assert report.bytes_after == target.stats()[0].size_bytes < report.bytes_before
