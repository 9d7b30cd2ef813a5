"""The content address of a chunk's keys and values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

import numpy as np

from qcfuse_rag.models.fingerprint import Fingerprint, digest


@dataclass(frozen=True)
class ChunkKey:
    """Everything a chunk's keys and values depend on, and whose they are; the same key means the same entry.

    Attributes:
        fingerprint: the model.
        base: how the chunk was prefilled, see `store.prefill_base`.
        prefix: hash of the token ids in front of it when it was.
        ids: hash of its own token ids.
        namespace: a tenant's token, which cannot be guessed, see `store.backends.tenant`; empty for entries all may share.
    """

    fingerprint: Fingerprint
    base: str
    prefix: str
    ids: str
    namespace: str = ""

    @cached_property
    def address(self) -> str:
        """32 hexadecimal digits that name the entry in every store, behind the tenant's 16 and a dash if it has one."""
        own = digest(json.dumps(self.fields(), sort_keys=True).encode())
        return f"{tenant_prefix(self.namespace)}{own}"

    def fields(self) -> dict[str, Any]:
        """Return the parts by name, ready for JSON."""
        return {
            "fingerprint": self.fingerprint.fields(),
            "base": self.base,
            "prefix": self.prefix,
            "ids": self.ids,
            "namespace": self.namespace,
        }

    def differences(self, other: ChunkKey) -> list[str]:
        """Name the parts in which another key differs from this one."""
        parts = [name for name in ("base", "prefix", "ids", "namespace") if getattr(other, name) != getattr(self, name)]
        return self.fingerprint.differences(other.fingerprint.fields()) + parts

    @classmethod
    def from_fields(cls, parts: dict[str, Any]) -> Self:
        """Return the key that `fields` was taken from.

        Raises:
            ValueError: if these are not the fields of a key.
        """
        try:
            fingerprint = Fingerprint(**parts["fingerprint"])
            key = cls(fingerprint, **{name: value for name, value in parts.items() if name != "fingerprint"})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a key: {error}") from error
        texts = [getattr(key, field.name) for field in fields(cls) if field.name != "fingerprint"]
        if not all(isinstance(text, str) for text in (*texts, *fingerprint.fields().values())):
            raise ValueError("not a key: a part is not text")
        "".join(texts).encode()  # what cannot be encoded has no address, which is a ValueError too
        return key


def tenant_prefix(namespace: str) -> str:
    """Return what the addresses of a tenant's entries begin with; tells nothing of the token."""
    return f"{digest(namespace.encode())[:16]}-" if namespace else ""


def address_of(key: ChunkKey | str) -> str:
    """Return the address of a key, or the address itself."""
    return key if isinstance(key, str) else key.address


def hash_ids(ids: Sequence[int]) -> str:
    """Return 32 hexadecimal digits for a sequence of token ids."""
    return digest(np.asarray(ids, dtype="<i8").tobytes())
