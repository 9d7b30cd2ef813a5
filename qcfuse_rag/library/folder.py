"""Locate and open a library: a folder with a KV store, indexed passages and the record of the last warming job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.library.index import INDEX_FILE
from qcfuse_rag.library.jobs import RECORD_NAME
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.backends.disk import DiskStore, read_settings
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.entry.encryption import environment_cipher, environment_secret
from qcfuse_rag.store.factory import open_store

KV_FOLDER, INDEX_FOLDER = "kv", "passages"
TEXT_FOLDER = re.compile(f"{INDEX_FOLDER}(-[0-9a-f]+)?")
"""Name of a passage folder: the common folder, or the folder of one tenant."""
SETTINGS_NAME = "library.json"


def open_library_store(
    folder: Path,
    *,
    kv_dtype: str | None = None,
    limit_gb: float | None = None,
    tenant: str | None = None,
    encrypt: bool = False,
    remote: str | None = None,
    memory_bytes: int = 2 << 30,
) -> KVStore:
    """Open all tiers of a library's store, or of a store's own folder; create the store if it does not exist.

    If the environment variable QCFUSE_SECRET is set, the store has to be encrypted under it; a new store is. `encrypt`
    requires the variable.
    """
    return open_store(
        store_folder(folder),
        disk_bytes=None if limit_gb is None else int(limit_gb * 1e9),
        memory_bytes=memory_bytes,
        kv_dtype=kv_dtype,
        tenant=tenant,
        encrypt=encrypt or None,
        remote=remote,
    )


@contextmanager
def open_store_and_sources(
    folder: Path, *, tenant: str | None = None, remote: str | None = None
) -> Iterator[tuple[KVStore, Sources]]:
    """Open all tiers of an existing store together with the list of its documents.

    The remote's URL is needed only if the stored URL lacks a password.
    """
    existing_store_folder(folder)
    with (
        open_library_store(folder, tenant=tenant, remote=remote, memory_bytes=1) as store,
        closing(Sources(store)) as sources,
    ):
        yield store, sources


def open_disk_tier(folder: Path) -> DiskStore:
    """Open only the disk tier of an existing store, for maintenance of its files."""
    return DiskStore(existing_store_folder(folder), cipher=environment_cipher())


def has_secret(folder: Path) -> bool:
    """Return whether there is a secret in the environment, or a library's store or a store's own folder needs one."""
    if environment_secret() is not None:
        return True
    settings = read_settings(store_folder(folder))
    return settings is not None and settings.encrypted


def existing_store_folder(folder: Path) -> Path:
    """Return the folder of a store that must exist."""
    path = store_folder(folder)
    if not (path / "objects").is_dir():
        raise QCFuseError(f"there is no store in {folder}; `qcfuse warm run` makes one")
    return path


def store_folder(folder: Path) -> Path:
    """Return the store folder of a library, whether or not it exists; a folder that is a store is returned itself."""
    return folder if _is_store(folder) else folder / KV_FOLDER


def own_paths(library: Path) -> list[Path]:
    """Return what a library has made itself: its store, the passages of each tenant, settings and records."""
    return [library / KV_FOLDER, *text_folders(library), *text_files(library)] if library.is_dir() else []


def library_of(folder: Path) -> Path:
    """Return the library around a store, given the folder of either; a store by itself is returned itself."""
    if not _is_store(folder):
        return folder
    library = folder.resolve().parent
    return library if folder.resolve().name == KV_FOLDER and text_folders(library) else folder


def refuse_store(folder: Path) -> None:
    """Refuse a folder that is itself a store, because a store has no passages to search."""
    if not _is_store(folder):
        return
    path = folder.resolve()
    fix = f"say --store {path.parent}" if path.name == KV_FOLDER else f"move it to {path.parent}/LIBRARY/{KV_FOLDER}"
    raise QCFuseError(f"{folder} is a store, but this command needs the library around it, with its passages: {fix}")


def index_folder(library: Path, store: KVStore | None = None) -> Path:
    """Return the folder of a library's passages; each tenant has its own folder."""
    return library / (INDEX_FOLDER if store is None or not store.prefix else f"{INDEX_FOLDER}-{store.prefix[:-1]}")


def text_folders(library: Path) -> list[Path]:
    """Return the passage folders of a library: the common folder and those of its tenants."""
    folders = [path for path in library.iterdir() if TEXT_FOLDER.fullmatch(path.name)]
    return [path for path in folders if path.is_dir() and not path.is_symlink()]


def text_files(library: Path) -> list[Path]:
    """Return a library's files outside its store that name or hold text: passages, settings, the last job's record."""
    paths = [path for folder in text_folders(library) for path in folder.iterdir()]
    index_files = [path for path in paths if INDEX_FILE.fullmatch(path.name)]
    records = [library / name for name in (RECORD_NAME, SETTINGS_NAME)]
    record_files = [path for record in records for path in (record, *library.glob(f"{record.name}.*.part"))]
    return [*index_files, *record_files, library / f"{RECORD_NAME}.lock"]


def _is_store(folder: Path) -> bool:
    return (folder / "objects").is_dir() and not (folder / KV_FOLDER).is_dir()
