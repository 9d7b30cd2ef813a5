"""Helpers that look into the folder of a store on disk."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore, KVStore
from qcfuse_rag.store.entry.codec import encode
from qcfuse_rag.store.testing import example_chunk, example_key

SECRET = bytes(range(32))

KEY = example_key()

ENTRY = sum(len(part) for part in encode(KEY, example_chunk()))
"""Bytes of an example's file."""


def file_of(store: DiskStore, number: int = 0) -> Path:
    return store.files.path(example_key(number).address)


def taken(folder: Path) -> int:
    """Return the bytes of entries, of what is being written, and of what is in quarantine."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.suffix in (".kv", ".part"))


def put(store: KVStore, *numbers: int, **options: float) -> None:
    for number in numbers:
        store.put(example_key(number), example_chunk(number), **options)


def present(store: KVStore, count: int) -> list[bool]:
    return [example_key(number) in store for number in range(count)]


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + seconds)


def in_a_child(work: Callable[[], None]) -> int:
    """Run something in another process, which may be killed for it; return its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
