"""A library, what the command line works on: a folder that holds caches, passages and their embeddings."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from qcfuse_rag.cli.job import NAME as JOB_NAME
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.retrieval.index import ABOUT, EMBEDDINGS, PASSAGES, PassageIndex
from qcfuse_rag.retrieval.retrieval_log import NAME as LOG_NAME
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.backends.disk import DiskStore
from qcfuse_rag.store.backends.disk_settings import kept_settings
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.entry.encryption import Seal
from qcfuse_rag.store.factory import open_store

KV_FOLDER, INDEX_FOLDER = "kv", "passages"
TEXT_FOLDER = re.compile(f"{INDEX_FOLDER}(-[0-9a-f]+)?")
"""The passages of everybody, or of a tenant."""
INDEX_FILES = (PASSAGES, EMBEDDINGS, ABOUT, LOG_NAME)
DEFAULT_EMBEDDER = "all-MiniLM-L6-v2"
SECRET_VARIABLE = "QCFUSE_SECRET"


def open_kv(
    library: Path,
    *,
    numbers: str | None = None,
    limit_gb: float | None = None,
    tenant: str | None = None,
    encrypt: bool = False,
    remote: str | None = None,
) -> KVStore:
    """Open a library's store, or a store by itself; a secret comes from the environment variable QCFUSE_SECRET.

    Args:
        library: the library's folder, or the store's own.
        numbers: see `open_store`.
        limit_gb: most bytes on disk, in units of 10^9.
        tenant: whose view to open.
        encrypt: encrypt a new store; one that is encrypted is opened as such anyway.
        remote: URL of a bucket or server behind it, see `open_store`.

    Raises:
        StoreError: if it cannot be opened.
    """
    encrypted = encrypt or is_encrypted(library)
    return open_store(
        kv_folder(library),
        disk_bytes=None if limit_gb is None else int(limit_gb * 1e9),
        numbers=numbers,
        secret=_secret() if encrypted or tenant is not None else None,
        tenant=tenant,
        encrypt=encrypted,
        remote=remote,
    )


def is_encrypted(library: Path) -> bool:
    """Return whether a library's store, or a store by itself, is there and encrypted."""
    kept = kept_settings(kv_folder(library))
    return kept is not None and kept.encrypted


def open_disk(folder: Path) -> DiskStore:
    """Open the store of a library, or a store's folder itself, for looking after it.

    Raises:
        QCFuseError: if there is none.
    """
    place = disk_folder(folder)
    kept = kept_settings(place)
    return DiskStore(place, seal=Seal(_secret()) if kept is not None and kept.encrypted else None)


@contextmanager
def open_manifest(
    folder: Path, tenant: str | None = None, remote: str | None = None
) -> Iterator[tuple[KVStore, Sources]]:
    """Open the store of a library, or a store's folder itself, with the remote behind it, and its documents.

    Args:
        folder: of either.
        tenant: whose view.
        remote: URL of the remote, where the one that is kept lacks a password.

    Raises:
        QCFuseError: if there is none.
    """
    place = disk_folder(folder)
    kept = kept_settings(place)
    encrypted = kept is not None and kept.encrypted
    secret = _secret() if encrypted or tenant is not None else None
    with (
        open_store(place, memory_bytes=1, secret=secret, tenant=tenant, encrypt=encrypted, remote=remote) as store,
        closing(Sources(store)) as sources,
    ):
        yield store, sources


def disk_folder(folder: Path) -> Path:
    """Return where a library's store is.

    Raises:
        QCFuseError: if there is none.
    """
    place = kv_folder(folder)
    if not (place / "objects").is_dir():
        raise QCFuseError(f"no store in {folder}; `qcfuse warm run` makes one")
    return place


def kv_folder(folder: Path) -> Path:
    """Return where a library's store is or will be; a folder that is a store itself is its own."""
    return folder if _is_store(folder) else folder / KV_FOLDER


def require_library(folder: Path) -> None:
    """Complain of a folder that is a store itself, which has no passages to look in.

    Raises:
        QCFuseError: if it is one.
    """
    if not _is_store(folder):
        return
    whole = folder.resolve()
    fix = f"say --store {whole.parent}" if whole.name == KV_FOLDER else f"move it to {whole.parent}/LIBRARY/{KV_FOLDER}"
    raise QCFuseError(f"{folder} is a store, and this takes the library around it, where passages are: {fix}")


def index_folder(library: Path, store: KVStore | None = None) -> Path:
    """Return where a library's passages are; each tenant's are in a folder of their own."""
    return library / (INDEX_FOLDER if store is None or not store.prefix else f"{INDEX_FOLDER}-{store.prefix[:-1]}")


def forget_passages(library: Path, store: KVStore, source: str) -> int:
    """Take a document out of a library's index, so that nothing finds it; return how many passages it had there."""
    place = index_folder(library, store)
    if not place.is_dir():
        return 0
    index = PassageIndex.load(place)
    count = len(index.passages)
    index.remove({source})
    if len(index.passages) < count:
        index.save(place)
    return count - len(index.passages)


def text_folders(library: Path) -> list[Path]:
    """Return the folders of a library that hold passages: everybody's, and each tenant's."""
    return [one for one in library.iterdir() if one.is_dir() and TEXT_FOLDER.fullmatch(one.name)]


def text_files(library: Path) -> list[Path]:
    """Return the files of a library that hold text and names, beside its store: passages, and the last job's record."""
    own = [path for folder in text_folders(library) for name in INDEX_FILES for path in folder.glob(f"{name}*")]
    return [*own, *(library / name for name in (JOB_NAME, f"{JOB_NAME}.lock")), *library.glob(f"{JOB_NAME}.*.part")]


@contextmanager
def needing_extra() -> Iterator[None]:
    """Turn the absence of what only the command line needs into one clear error."""
    try:
        yield
    except ImportError as error:
        raise QCFuseError(f"{error.name} is missing; run `pip install 'qcfuse-rag[cli]'`") from error


def _is_store(folder: Path) -> bool:
    return (folder / "objects").is_dir() and not (folder / KV_FOLDER).is_dir()


def _secret() -> bytes:
    secret = os.environ.get(SECRET_VARIABLE, "").encode()
    if not secret:
        raise QCFuseError(f"this needs a secret; set {SECRET_VARIABLE} to at least 16 random bytes and keep them")
    return secret
