"""The content address of a chunk's keys and values, and the bases: the tokens a chunk is prefilled behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from qcfuse_rag.models.fingerprint import Fingerprint, digest


@dataclass(frozen=True)
class ChunkKey:
    """Everything a chunk's keys and values depend on, and their tenant; the same key means the same entry."""

    fingerprint: Fingerprint
    base: str  # how the chunk was prefilled, see `Base`
    prefix: str  # hash of the token ids it was prefilled behind
    ids: str  # hash of its own token ids
    namespace: str = ""  # a tenant's token, which cannot be guessed, see `store.backends.tenant`

    @cached_property
    def address(self) -> str:
        """The name of the entry in every store: 32 hexadecimal digits, after 16 and a dash for a tenant's entry."""
        return f"{tenant_prefix(self.namespace)}{digest(json.dumps(self.fields(), sort_keys=True).encode())}"

    def fields(self) -> dict[str, Any]:
        """Return the parts by name, ready for JSON."""
        return {
            "fingerprint": self.fingerprint.fields(),
            "base": self.base,
            "prefix": self.prefix,
            "ids": self.ids,
            "namespace": self.namespace,
        }

    def passage_key(self) -> ChunkKey:
        """Return a key that the chunk has in common with the same passage under other bases."""
        return replace(self, base="", prefix="")

    def differences(self, other: ChunkKey) -> list[str]:
        """Name the parts in which another key differs from this one."""
        parts = [name for name in ("base", "prefix", "ids", "namespace") if getattr(other, name) != getattr(self, name)]
        return self.fingerprint.differences(other.fingerprint.fields()) + parts

    @classmethod
    def from_fields(cls, parts: dict[str, Any]) -> Self:
        """Return the key that has these fields; raises `ValueError` if they are not the fields of a key."""
        try:
            fingerprint = Fingerprint(**parts["fingerprint"])
            key = cls(fingerprint, **{name: value for name, value in parts.items() if name != "fingerprint"})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a key: {error}") from error
        texts = [getattr(key, field.name) for field in fields(cls) if field.name != "fingerprint"]
        if not all(isinstance(text, str) for text in (*texts, *fingerprint.fields().values())):
            raise ValueError("not a key: a part is not text")
        "".join(texts).encode()  # text that cannot be encoded has no address; this raises a ValueError too
        return key


def tenant_prefix(namespace: str) -> str:
    """Return the beginning of the addresses of a tenant's entries; it does not reveal the token."""
    return f"{digest(namespace.encode())[:16]}-" if namespace else ""


def address_of(key: ChunkKey | str) -> str:
    """Return the address of a key, or the address itself."""
    return key if isinstance(key, str) else key.address


def hash_ids(ids: Sequence[int]) -> str:
    """Return 32 hexadecimal digits for a sequence of token ids."""
    return digest(np.asarray(ids, dtype="<i8").tobytes())


@dataclass(frozen=True, slots=True)
class Base:
    """A way to prefill chunks. Methods may add bases that they compute themselves, see `ingestion.extension`.

    Attributes:
        name: part of every key.
        after_prefix: prefill behind the system prefix, whose keys and values are not stored with the chunk.
        primed: prefill behind the system prefix and a few fixed passages, see `ingestion.primer`.
        derived: prefill behind other passages too, which differ from chunk to chunk.
        revision: part of every key; another one is another text in front of the chunks under the same name.
    """

    name: str
    after_prefix: bool
    primed: bool = False
    derived: bool = False
    revision: int = 1

    def prefix(self, prefix_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the token ids a chunk is prefilled behind, given those of the system prefix.

        They do not include other passages or the primer's text: these are not in the prompt.
        """
        return prefix_ids if self.after_prefix else ()

    def exact_at(self, start: int, ids: tuple[int, ...], prefix_ids: tuple[int, ...]) -> bool:
        """Return whether a chunk at position `start` of a prompt of `ids` equals what full prefill would compute."""
        if self.derived or self.primed:
            return False
        prefix = self.prefix(prefix_ids)
        return start == len(prefix) and ids[:start] == prefix

    def key(self, fingerprint: Fingerprint, prefix_ids: tuple[int, ...], ids: tuple[int, ...] | str) -> ChunkKey:
        """Return the address of a chunk's keys and values under this base, by its token ids or their hash."""
        prefix = hash_ids(self.prefix(prefix_ids))
        if self.revision > 1:
            prefix = digest(f"{prefix} {self.revision}".encode())
        return ChunkKey(fingerprint, self.name, prefix, ids if isinstance(ids, str) else hash_ids(ids))


BLIND = Base("blind", after_prefix=False)
"""No prefix, positions from 0: what QCFuse, CacheBlend and PromptCache store. Every chunk has an attention sink."""

FRAMED = Base("framed", after_prefix=True)
"""Behind the system prefix: the first chunk of a prompt is exact, the others have no attention sinks of their own."""

PRIMED = Base("primed", after_prefix=True, primed=True, revision=2)
"""Behind the system prefix and fixed passages: none is first in its context, and none carries a passage of yours."""

BASES = {base.name: base for base in (BLIND, FRAMED, PRIMED)}
"""The bases that need no method; `methods.find_base` knows those of methods too."""
