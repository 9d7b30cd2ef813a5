"""Settings are kept with a store on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.disk import StoreSettings
from qcfuse_rag.store.testing import assert_same, example_chunk
from tests.store.disk.folders import ENTRY, KEY, put


def test_settings_need_be_given_only_once(folder: Path) -> None:
    with DiskStore(folder.with_name("defaults")) as store:
        assert store.settings == StoreSettings(64 << 30, "model", "cost", None)
    given = {"limit_bytes": 10 * ENTRY, "kv_dtype": "int8", "eviction": "lru", "ttl_s": 60.0}
    with DiskStore(folder, **given):  # type: ignore[arg-type]
        pass
    with DiskStore(folder) as store:
        assert {name: getattr(store.settings, name) for name in given} == given
        assert store.kv_dtype == "int8"
        assert store.stats()[0].limit_bytes == 10 * ENTRY
    with DiskStore(folder, eviction="lfu"):
        pass
    with DiskStore(folder) as store:
        assert {name: getattr(store.settings, name) for name in given} == {**given, "eviction": "lfu"}


def test_settings_that_a_later_version_has_are_passed_over(folder: Path) -> None:
    DiskStore(folder, limit_bytes=12345).close()
    kept = json.loads((folder / "store.json").read_text())
    assert ("remote" in kept, kept["numbers"]) == (False, "model"), "so that earlier versions open it as well"
    (folder / "store.json").write_text(json.dumps({**kept, "colour": "green"}))
    with DiskStore(folder) as store:
        assert store.limit_bytes == 12345


@pytest.mark.parametrize(
    "content", ["", "[]", '{"numbers": "fp8"}', '{"limit_bytes": "much"}', '{"ttl_s": "long"}', "\0"]
)
def test_unreadable_settings_are_one_clear_error(folder: Path, content: str) -> None:
    DiskStore(folder).close()
    (folder / "store.json").write_text(content)
    with pytest.raises(
        StoreError, match=r"cannot read .*store\.json .*; remove it and give the store's settings again"
    ):
        DiskStore(folder)


def test_entries_of_another_kv_dtype_stay_as_they_are(folder: Path) -> None:
    with DiskStore(folder) as store:
        put(store, 0)
    with DiskStore(folder, kv_dtype="int8") as store:
        put(store, 1)
        assert_same(store.get(KEY), example_chunk())
        assert [entry.kv_dtype for entry in sorted(store.entries(), key=lambda e: e.used or 0.0)] == ["model", "int8"]


@pytest.mark.parametrize(
    "given",
    [{"limit_bytes": 0}, {"ttl_s": 0.0}, {"kv_dtype": "int4"}, {"eviction": "fifo"}],
    ids=str,
)
def test_settings_that_cannot_be_are_refused_and_not_kept(folder: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be more than 0|there are"):
        DiskStore(folder, **given)
    DiskStore(folder).close()
