"""The settings of a store on disk, kept in its folder, so that they hold for everybody who opens it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from qcfuse_rag.errors import CorruptEntry, ForeignEntry, StoreError
from qcfuse_rag.store.backends.base import eviction_policy
from qcfuse_rag.store.backends.files import StoreFiles
from qcfuse_rag.store.entry.codec import ENCRYPTED, PREAMBLE, Preamble
from qcfuse_rag.store.entry.encryption import SECRET_VARIABLE, TENANT_SECRET_VARIABLE, StoreCipher
from qcfuse_rag.store.entry.reader import MappedFile, open_header
from qcfuse_rag.store.quantization import LOSSLESS, check_numbers

PLAIN_FIX = (
    f"a program with a secret refuses plain entries: warm into another folder, or unset {SECRET_VARIABLE}; for a "
    f"secret that only names tenants, say encrypt=False or set {TENANT_SECRET_VARIABLE} instead"
)
SECRET_FIX = f"give its secret, or set {SECRET_VARIABLE}"


DEFAULT_LIMIT_BYTES = 64 << 30


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Settings of a store.

    Attributes:
        limit_bytes: most bytes its files may take.
        numbers: format of new entries, see `store.quantization`.
        eviction: `cost`, `lru` or `lfu`, see `store.backends.base`.
        ttl_s: seconds after which an entry expires, or None.
        secret: `StoreCipher.proof` of the secret that entries are encrypted under; None if they are not encrypted.
        remote: URL of the remote behind it, without its password; empty if there is none.
    """

    limit_bytes: int = DEFAULT_LIMIT_BYTES
    numbers: str = LOSSLESS
    eviction: str = "cost"
    ttl_s: float | None = None
    secret: str | None = None
    remote: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.limit_bytes, int | float) or not isinstance(self.ttl_s, int | float | None):
            raise ValueError("limit_bytes and ttl_s are numbers")
        if not isinstance(self.secret, str | None) or not isinstance(self.remote, str):
            raise ValueError("secret and remote are text")
        if self.limit_bytes <= 0 or (self.ttl_s is not None and self.ttl_s <= 0):
            raise ValueError("limit_bytes and ttl_s must be more than 0")
        check_numbers(self.numbers)
        eviction_policy(self.eviction)

    @property
    def encrypted(self) -> bool:
        """Whether entries are encrypted."""
        return self.secret is not None


def resolve_settings(files: StoreFiles, given: dict[str, Any], cipher: StoreCipher | None) -> StoreSettings:
    """Return a store's settings: those given, else those kept with it, else the defaults; then keep them.

    Raises:
        StoreError: if the settings cannot be read, or the store is encrypted under another secret, or encrypted and
            no secret was given, or the other way round.
        ValueError: if there is no such format or policy.
    """
    path = files.folder / "store.json"
    kept = read_settings(files.folder)
    _check_secret(files, kept, cipher)
    base = kept or StoreSettings(secret=None if cipher is None else cipher.proof)
    settings = replace(base, **{name: value for name, value in given.items() if value is not None})
    if settings != kept:
        fields_kept = {name: value for name, value in asdict(settings).items() if name != "remote" or value}
        write_if_possible(lambda: files.write_json(path, fields_kept))
    return settings


def _check_secret(files: StoreFiles, kept: StoreSettings | None, cipher: StoreCipher | None) -> None:
    """Check the secret against the settings or, if there are none, against the entries; see `resolve_settings`."""
    proof, folder = (None if cipher is None else cipher.proof), files.folder
    found = _secrets_of_entries(files, cipher) if kept is None else {kept.secret}
    what = f"entries of the store in {folder} are" if kept is None else f"the store in {folder} is"
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
        try:
            entry = MappedFile(path, header_only=True)
            if not Preamble.parse(entry.read(0, min(PREAMBLE.size, entry.size))).flags & ENCRYPTED:
                found.add(None)
                continue
            open_header(entry, cipher)
        except ForeignEntry:
            found.add("")
        except (OSError, CorruptEntry):
            continue
        else:
            return {*found, None if cipher is None else cipher.proof}
    return found


def write_if_possible(write: Callable[[], None]) -> None:
    """Write something that is not essential: a full or read-only disk is reported elsewhere."""
    try:
        write()
    except OSError:
        return


def read_settings(folder: Path) -> StoreSettings | None:
    """Return the settings kept with a store, or None if there is no store.

    Raises:
        StoreError: if the settings cannot be read.
    """
    path = folder / "store.json"
    try:
        kept = json.loads(path.read_text())
        known = {field.name for field in fields(StoreSettings)}
        return StoreSettings(**{name: value for name, value in kept.items() if name in known})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"cannot read {path} ({error}); remove it and give the store's settings again") from error
