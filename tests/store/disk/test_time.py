"""Expiry in a store on disk."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.store.testing import example_chunk
from tests.store.disk.folders import ENTRY, KEY, later, present, put, taken


def test_expired_entries_go_before_all_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(folder, 3 * ENTRY) as store:
        store.put(KEY, example_chunk().with_expiry(time.time() + 60.0), saved_ms=1e6)
        store.pin(KEY)
        put(store, 1, 2)
        later(monkeypatch, 61.0)
        put(store, 3)
        assert present(store, 4) == [False, True, True, True]


def test_what_is_in_quarantine_lasts_no_longer_than_it_would_have(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskStore(folder, ttl_s=60.0) as store:
        put(store, 0)
        store.discard(KEY, "looks odd")
        put(store, 1)
        assert taken(folder) == 2 * ENTRY
        later(monkeypatch, 61.0)
        put(store, 2)
        assert list((folder / "quarantine").iterdir()) == []
        assert store.stats()[0].size_bytes == taken(folder) == ENTRY


def test_what_was_over_when_it_was_found_damaged_makes_room_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskStore(folder, ttl_s=60.0) as store:
        put(store, 0)
        later(monkeypatch, 61.0)
        store.discard(KEY, "looks odd")
        later(monkeypatch, 62.0)
        put(store, 1)
        assert list((folder / "quarantine").iterdir()) == []
