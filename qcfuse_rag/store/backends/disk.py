"""A store on local disk: one file per chunk, found by name; an index keeps the folder within its limit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from qcfuse_rag.errors import CorruptEntry, ForeignEntry, StoreError
from qcfuse_rag.models.fingerprint import Fingerprint
from qcfuse_rag.store.backends.base import EntryInfo, EntryStore, Health, Miss, StoreStats, eviction_policy
from qcfuse_rag.store.backends.files import StoreFiles
from qcfuse_rag.store.backends.index import (
    ENTRY,
    INDEX_FAILURES,
    PINNED,
    UNKNOWN_MS_PER_TOKEN,
    DiskQuota,
    IndexReplaced,
    is_damage,
    open_index,
)
from qcfuse_rag.store.backends.remote import url_without_secrets
from qcfuse_rag.store.chunk import ChunkKV, to_store_format
from qcfuse_rag.store.entry.codec import MappedFile, encode, open_chunk
from qcfuse_rag.store.entry.encryption import SECRET_VARIABLE, TENANT_SECRET_VARIABLE, StoreCipher
from qcfuse_rag.store.key import ChunkKey, address_of
from qcfuse_rag.store.quantization import LOSSLESS, check_kv_dtype

PLAIN_FIX = (
    f"a program with a secret refuses plain entries: warm into another folder, or unset {SECRET_VARIABLE}; for a "
    f"secret that only names tenants, say encrypt=False or set {TENANT_SECRET_VARIABLE} instead"
)
SECRET_FIX = f"give its secret, or set {SECRET_VARIABLE}"

DEFAULT_LIMIT_BYTES = 64 << 30


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Settings of a store."""

    limit_bytes: int = DEFAULT_LIMIT_BYTES  # most bytes its files may take
    kv_dtype: str = LOSSLESS
    eviction: str = "cost"
    ttl_s: float | None = None  # seconds after which an entry expires, or None
    secret: str | None = None  # `StoreCipher.proof` of what entries are encrypted under; None if they are not
    remote: str = ""  # URL of the remote behind it, without its password; empty if there is none

    def __post_init__(self) -> None:
        if not isinstance(self.secret, str | None) or not isinstance(self.remote, str):
            raise ValueError("secret and remote are text")
        if self.limit_bytes <= 0 or (self.ttl_s is not None and self.ttl_s <= 0):
            raise ValueError("limit_bytes and ttl_s must be more than 0")
        check_kv_dtype(self.kv_dtype)
        eviction_policy(self.eviction)

    @property
    def encrypted(self) -> bool:
        """Whether entries are encrypted."""
        return self.secret is not None


def resolve_settings(files: StoreFiles, given: dict[str, Any], cipher: StoreCipher | None) -> StoreSettings:
    """Return a store's settings: those given, else those saved with it, else the defaults; then save them."""
    path = files.folder / "store.json"
    saved = read_settings(files.folder)
    _check_secret(files, saved, cipher)
    base = saved or StoreSettings(secret=None if cipher is None else cipher.proof)
    settings = replace(base, **{name: value for name, value in given.items() if value is not None})
    if settings != saved:
        written = {name: value for name, value in asdict(settings).items() if name != "remote" or value}
        written["numbers"] = written.pop("kv_dtype")  # its name in the file
        with suppress(OSError):  # a full or read-only disk is reported elsewhere
            files.write_json(path, written)
    return settings


def _check_secret(files: StoreFiles, saved: StoreSettings | None, cipher: StoreCipher | None) -> None:
    """Check the secret against the settings or, if there are none, against the entries; see `resolve_settings`."""
    proof, folder = (None if cipher is None else cipher.proof), files.folder
    found = _secrets_of_entries(files, cipher) if saved is None else {saved.secret}
    what = f"entries of the store in {folder} are" if saved is None else f"the store in {folder} is"
    if proof is None and found - {None}:
        raise StoreError(f"{what} encrypted and no secret was given; {SECRET_FIX}")
    if proof is None or proof in found or not found:
        return
    if found == {None}:
        raise StoreError(f"{what} not encrypted and a secret was given; {PLAIN_FIX}")
    raise StoreError(f"{what} encrypted under another secret than the one given")


def _secrets_of_entries(files: StoreFiles, cipher: StoreCipher | None) -> set[str | None]:
    """Return the proofs of the secrets that entries are under: None for plain entries, empty for another secret."""
    found: set[str | None] = set()
    for _, path in files.entries():
        with suppress(OSError, CorruptEntry):
            entry = MappedFile(path, header_only=True)
            try:
                open_chunk(entry)
                found.add(None)
            except ForeignEntry:
                found.add("")
                if cipher is not None:
                    open_chunk(entry, cipher)
                    return {*found, cipher.proof}
    return found


def read_settings(folder: Path) -> StoreSettings | None:
    """Return the settings saved with a store, or None if there is no store; `StoreError` if they cannot be read."""
    path = folder / "store.json"
    try:
        saved = json.loads(path.read_text())
        known = {field.name for field in fields(StoreSettings)} & set(saved)
        return StoreSettings(**{name: saved[name] for name in known}, kv_dtype=saved.get("numbers", LOSSLESS))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"cannot read {path} ({error}); remove it and give the store's settings again") from error


Result = TypeVar("Result")


class DiskStore(EntryStore):
    """Keeps chunks in a folder, across processes and restarts.

    Reading an entry needs its file alone. If the index cannot be opened, on a full or read-only disk, the store still
    reads; if it is damaged, it is rebuilt from the files.

    Args:
        folder: created if it does not exist.
        limit_bytes: most bytes its files may take together, at any moment; 64 GiB if never given.
        kv_dtype: format of new entries; the model's own if never given.
        eviction: `cost` (if never given), `lru` or `lfu`, see `store.backends.base`.
        ttl_s: see `KVStore`.
        cipher: the cipher that encrypts entries.
        remote: URL of the remote behind the folder, kept for the next time it is opened; empty for none.

    Options that are not given are as the store was opened before.

    Attributes:
        files: names, writes and removes the files.
        quota: reserves bytes and evicts; None if the store cannot be written.
        settings: those saved in the folder.
        notes: what was wrong and has been repaired.

    Raises:
        StoreError: if the folder cannot be used, or is encrypted and `cipher` is None, or the other way round.
        ValueError: if there is no such format or policy.
    """

    kind = "disk"

    def __init__(
        self,
        folder: str | Path,
        limit_bytes: int | None = None,
        *,
        kv_dtype: str | None = None,
        eviction: str | None = None,
        ttl_s: float | None = None,
        cipher: StoreCipher | None = None,
        remote: str | None = None,
    ) -> None:
        super().__init__(cipher)
        self.folder: Path = Path(folder).expanduser()
        self.files = StoreFiles(self.folder)
        self.notes: list[str] = []
        self._problems: dict[str, str] = {}  # why its folder or its index cannot be written
        try:
            self.files.create()
        except OSError as error:
            if not os.path.isdir(self.files.objects):
                raise StoreError(f"cannot open a store in {self.folder}: {error}") from error
            self._problems["folder"] = f"cannot be written: {error}"
        given = {"limit_bytes": limit_bytes, "kv_dtype": kv_dtype, "eviction": eviction, "ttl_s": ttl_s}
        given["remote"] = None if remote is None else url_without_secrets(remote)
        self.settings = resolve_settings(self.files, given, cipher)
        self.kv_dtype, self.limit_bytes = self.settings.kv_dtype, self.settings.limit_bytes
        self.ttl_s = self.settings.ttl_s
        self._models = self._read_models()
        self.quota = self._open_quota()

    def get(self, key: ChunkKey) -> ChunkKV | Miss:
        found = super().get(key)
        if isinstance(found, ChunkKV):
            self.note_use(key.address)
        return Miss(self._absence_reason(key)) if found == Miss("absent") else found

    def note_use(self, address: str) -> None:
        if self.quota is not None:
            self.quota.record_use(address)

    def put(self, key: ChunkKey, chunk: ChunkKV, *, saved_ms: float | None = None) -> None:
        """Write the chunk; it can be read only once it is complete on disk."""
        self.require_quota()
        converted = to_store_format(chunk, self.kv_dtype).with_ttl(self.ttl_s)
        parts = encode(key, converted, cipher=self.cipher)
        if saved_ms is None:
            saved_ms = chunk.n_tokens * UNKNOWN_MS_PER_TOKEN
        try:
            size = sum(len(part) for part in parts)
            reservation = self.change(lambda quota: quota.reserve(key.address, size))
            try:
                self.files.write(reservation.temporary, parts)
                self.change(lambda quota: quota.publish(reservation, converted.kv_dtype, saved_ms, converted.expires))
            except BaseException:
                self.change(lambda quota: quota.release(reservation))
                raise
        except OSError as error:
            raise self._unwritable(error) from error
        self._record_model(key)

    def discard(self, key: ChunkKey | str, reason: str | None = None) -> bool:
        """Remove an entry; a damaged one is moved to quarantine."""
        address = address_of(key)
        if self.quota is None:
            return False
        try:
            removed = self.change(
                lambda quota: quota.remove(address) if reason is None else quota.quarantine(address, reason)
            )
        except StoreError:
            return False
        self._count("discarded", removed and reason is not None)
        return removed

    def __contains__(self, key: ChunkKey | str) -> bool:
        try:
            exists = self.files.size(address_of(key)) is not None
        except (OSError, ValueError):  # also for text that is no address
            return False
        return exists and (self.ttl_s is None or not isinstance(self.open(address_of(key)), Miss))

    def restore(self) -> None:
        with suppress(OSError, StoreError):
            self.files.create()
            if read_settings(self.folder) is None:
                resolve_settings(self.files, asdict(self.settings), self.cipher)
                self._models = {}
            self.change(lambda quota: quota.index.size())  # opens the index again

    def entries(self) -> Iterator[EntryInfo]:
        if self.quota is None:
            for address, path in self.files.entries():
                yield EntryInfo(address, path.stat().st_size)
            return
        for address, record, expires, tag in self.change(lambda quota: quota.index.rows(ENTRY, PINNED)):
            yield EntryInfo(
                address, **asdict(record.usage), kv_dtype=record.kv_dtype, expires=expires, pinned=tag == PINNED
            )

    def clear(self) -> int:
        """Remove every entry, including pinned and damaged ones and files without a row; return how many there were."""
        try:
            if self.quota is not None:
                addresses = {entry.address for entry in self.entries()}
                addresses |= {address for address, _ in self.files.entries()}
                self.change(DiskQuota.clear_quarantine)
                return sum(self.change(partial(DiskQuota.remove, address=address)) for address in addresses)
        except (StoreError, OSError):
            pass  # on a full disk the index cannot be written: remove the files first
        try:
            for path in list(self.files.quarantined_entries()):
                self.files.remove_quarantined(path.name)
            count = sum(self.files.remove(address) for address, _ in list(self.files.entries()))
        except OSError as error:
            raise self._unwritable(error) from error
        if self.quota is None:
            shutil.rmtree(self.files.folder / "index", ignore_errors=True)  # rebuilt when the store is opened next
        else:
            with suppress(StoreError, *INDEX_FAILURES):
                self.quota.index.clear()
        return count

    def pin(self, key: ChunkKey | str, *, pinned: bool = True) -> bool:
        return self.change(lambda quota: quota.pin(address_of(key), pinned=pinned))

    def stats(self) -> list[StoreStats]:
        limit, evicted = self.settings.limit_bytes, self.quota.evicted if self.quota else 0
        if self.quota is not None:
            self.quota.write_uses()
            entries, size = self.change(lambda quota: (quota.index.count(ENTRY, PINNED), quota.index.size()))
        else:
            sizes = [entry.size_bytes for entry in self.entries()]
            entries, size = len(sizes), sum(sizes)
        return [StoreStats("disk", entries, size, limit, **self._counts, evicted=evicted)]

    def health(self) -> list[Health]:
        """Check that the folder can be written, the index can be read, and the disk has room up to the limit."""
        problems = list(self._problems.values())
        try:
            probe = self.files.new_temporary()
            self.files.write(probe, [b"health"])
            probe.unlink()
            if self.quota is not None:
                remaining = self.settings.limit_bytes - self.change(lambda quota: quota.index.size())
                if remaining < 0:
                    problem = f"holds {-remaining:,} bytes more than its limit, pinned ones"
                    problems.append(f"{problem}; unpin some, or raise it")
                free = shutil.disk_usage(self.files.folder).free
                # Nobody asked for the default limit; a smaller disk is no fault of it.
                if free < remaining and self.settings.limit_bytes != DEFAULT_LIMIT_BYTES:
                    problems.append(f"may take {remaining:,} bytes more, the disk has {free:,}; lower the limit")
        except OSError as error:
            problems.append(f"cannot be written: {error}")
        except StoreError as error:
            problems.append(str(error))
        return [Health("disk", not problems, tuple(dict.fromkeys(problems)))]

    def close(self) -> None:
        if self.quota is not None:
            self.quota.write_uses()
            self.quota.index.close()

    def models(self) -> dict[str, dict[str, str]]:
        """Return the fingerprints of the models whose chunks were stored here, by digest, the newest last."""
        return dict(self._models)

    def change(self, change: Callable[[DiskQuota], Result], *, again: bool = True) -> Result:
        """Read or change the index; if it turns out to be damaged or replaced, open it again, and do so once more."""
        quota = self.require_quota()
        try:
            return change(quota)
        except INDEX_FAILURES as error:
            if not (again and is_damage(error)):
                raise self._unwritable(error) from error
            with self._lock:
                if self.quota is quota:
                    damaged = None if isinstance(error, IndexReplaced) else quota.index.file_number
                    self.quota = self._open_quota(damaged)
        return self.change(change, again=False)

    def require_quota(self) -> DiskQuota:
        """Return the quota, after another try if the index could not be opened; raises `StoreError` if that fails."""
        if self.quota is None:
            with self._lock:
                self.quota = self.quota or self._open_quota()
        if self.quota is None:
            raise self._unwritable()
        return self.quota

    def _read(self, address: str) -> MappedFile:
        return MappedFile(self.files.path(address))

    def _absence_reason(self, key: ChunkKey) -> str:
        """Return why an entry is absent: never stored, or stored for another model, with what differs."""
        if not self._models or key.fingerprint.digest in self._models:
            return "absent"
        differing = min((key.fingerprint.differences(other) for other in self._models.values()), key=len)
        return f"absent: the store holds chunks of another model, {', '.join(differing)} differ"

    def _open_quota(self, damaged: int | None = None) -> DiskQuota | None:
        """Open the index, and fill it from the files if it has no entries; return None if it cannot be opened."""
        self._problems.pop("index", None)
        failed = "opened"
        try:
            index, note = open_index(self.files.folder / "index", damaged)
            self.notes += [note] if note else []
            failed = "written"
            worth = eviction_policy(self.settings.eviction)
            quota = DiskQuota(index, self.files, self.settings.limit_bytes, worth, self.cipher)
            if not index.count(ENTRY, PINNED):
                quota.refill()
            quota.enforce_limit()
        except INDEX_FAILURES as error:
            self._problems["index"] = f"its index cannot be {failed}: {error}"
            return None
        return quota

    def _unwritable(self, error: Exception | None = None) -> StoreError:
        return StoreError(f"cannot write to {self.folder}: {error or '; '.join(self._problems.values())}")

    def _read_models(self) -> dict[str, dict[str, str]]:
        models = {}
        for path in sorted((self.files.folder / "models").glob("*.json"), key=os.path.getmtime):
            try:
                models[path.stem] = Fingerprint(**json.loads(path.read_text())).fields()
            except (OSError, ValueError, TypeError, RecursionError):
                continue  # it only explains misses
        return models

    def _record_model(self, key: ChunkKey) -> None:
        digest = key.fingerprint.digest
        if digest not in self._models:
            self._models[digest] = key.fingerprint.fields()
            path = self.files.folder / "models" / f"{digest}.json"
            with suppress(OSError):
                self.files.write_json(path, key.fingerprint.fields())
