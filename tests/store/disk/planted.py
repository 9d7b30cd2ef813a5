"""Things of other programs in the places of a store's files and folders, and every operation of a store."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from qcfuse_rag import DiskStore
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.documents.manifest import manifest_damage, quarantine_manifest
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.maintenance import collect_garbage, fsck, rebuild
from qcfuse_rag.store.testing import example_key
from tests.store.disk.folders import KEY, put

ADDRESS = KEY.address
NAME = f"{ADDRESS}.kv"
SHARD = ADDRESS[-2:]
OTHER = "ab" * 16


def full_folder(path: Path, outside: Path) -> None:
    path.mkdir()
    (path / NAME).write_text("not the store's")


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "pipe": lambda path, outside: os.mkfifo(path),
    "socket": lambda path, outside: os.mknod(path, stat.S_IFSOCK | 0o600),
    "folder": lambda path, outside: path.mkdir(),
    "full folder": full_folder,
    "link to a file": lambda path, outside: path.symlink_to(outside / "thesis.kv"),
    "link to a folder": lambda path, outside: path.symlink_to(outside),
    "link to an empty folder": lambda path, outside: path.symlink_to(outside / "empty"),
    "link to nothing": lambda path, outside: path.symlink_to(outside / "nothing"),
    "link to itself": lambda path, outside: path.symlink_to(path),
    "text": lambda path, outside: path.write_text("not the store's"),
    "deep JSON": lambda path, outside: path.write_text('{"a":' * 100_000),
    "nothing": lambda path, outside: path.touch(),
}

PLACES = {
    "an entry": f"objects/{SHARD}/{NAME}",
    "an absent entry": f"objects/ab/{OTHER}.kv",
    "a copy": f"objects/{SHARD}/{ADDRESS} (copy).kv",
    "capitals": f"objects/{SHARD}/{ADDRESS.upper()}.kv",
    "a short name": f"objects/{SHARD}/{SHARD}.kv",
    "no name": f"objects/{SHARD}/.kv",
    "a new line": f"objects/{SHARD}/{ADDRESS}\n.kv",
    "another folder": f"objects/00/{OTHER}.kv",
    "a folder of entries": f"objects/{SHARD}",
    "an absent folder of entries": "objects/ab",
    "no folder of entries": "objects/zz",
    "beside the folders": f"objects/{NAME}",
    "objects": "objects",
    "tmp": "tmp",
    "a writer's": "tmp/host-1-0123456789abcdef.part",
    "among writers'": "tmp/copy",
    "quarantine": "quarantine",
    "in quarantine": f"quarantine/{NAME}",
    "a copy in quarantine": "quarantine/X (copy).kv",
    "a reason": f"quarantine/{ADDRESS}.json",
    "models": "models",
    "a model": "models/x.json",
    "settings": "store.json",
    "index": "index",
    "the index": "index/cache.db",
    "the index's log": "index/cache.db-wal",
    "the index's memory": "index/cache.db-shm",
    "documents": "sources.db",
    "the documents' log": "sources.db-wal",
    "the documents' memory": "sources.db-shm",
    "the documents' journal": "sources.db-journal",
}


def make_outside(folder: Path) -> Path:
    """Make a folder that is nobody's business, with files that have the names of a store's."""
    folder.mkdir()
    for name in (NAME, "thesis.kv", "cache.db", "x.part", "x.json"):
        (folder / name).write_text("twenty years of work")
    (folder / "empty").mkdir()
    return folder


def everything(folder: Path) -> dict[str, object]:
    """Return what is in a folder, with contents, modes and times."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else None,
        )
        for path in folder.rglob("*")
    }


def plant(folder: Path, place: str, kind: str, outside: Path) -> Path:
    """Put something in the place of a file or folder of a store; what was there goes."""
    path = folder / place
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    KINDS[kind](path, outside)
    return path


def documents(store: DiskStore) -> None:
    with closing(Sources(store)) as sources:
        sources.replace("a", [example_key(1)])
        sources.forget("a")


OPERATIONS: dict[str, Callable[[DiskStore], object]] = {
    "get": lambda store: store.get(KEY),
    "open": lambda store: store.open(OTHER),
    "contains": lambda store: OTHER in store,
    "put": lambda store: put(store, 0, 2),
    "quarantine": lambda store: store.discard(KEY, "looks odd"),
    "put again": lambda store: put(store, 0),
    "report": lambda store: [list(store.entries()), store.stats(), store.health(), store.models()],
    "pin": lambda store: store.pin(KEY),
    "documents": documents,
    "fsck": fsck,
    "gc": collect_garbage,
    "rebuild": rebuild,
    "damage": lambda store: manifest_damage(store.folder),
    "set aside": lambda store: quarantine_manifest(store.folder),
    "documents again": documents,
    "discard": lambda store: store.discard(KEY),
    "clear": lambda store: store.clear(),
}
"""All that can be done with a store, in an order that leaves each something to do."""


def operate(folder: Path) -> None:
    """Do everything that can be done with a store; only errors with a name are allowed."""
    try:
        store = DiskStore(folder)
    except StoreError:
        return
    with store:
        for operation in OPERATIONS.values():
            try:
                operation(store)
            except StoreError:
                continue
