"""The content address of a chunk's keys and values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from qcfuse_rag.model.fingerprint import Fingerprint, digest


@dataclass(frozen=True)
class ChunkKey:
    """Everything a chunk's keys and values depend on; the same key means the same bytes.

    Attributes:
        fingerprint: the model.
        base: how the chunk was prefilled, see `ingest.base`.
        prefix: hash of the token ids in front of it when it was.
        ids: hash of its own token ids.
    """

    fingerprint: Fingerprint
    base: str
    prefix: str
    ids: str

    @cached_property
    def address(self) -> str:
        """32 hexadecimal digits; names the entry in every store."""
        return digest(json.dumps(self.fields(), sort_keys=True).encode())

    def fields(self) -> dict[str, str | dict[str, str]]:
        """Return the parts by name, ready for JSON."""
        return {
            "fingerprint": self.fingerprint.fields(),
            "base": self.base,
            "prefix": self.prefix,
            "ids": self.ids,
        }


def hash_ids(ids: Sequence[int]) -> str:
    """Return 32 hexadecimal digits for a sequence of token ids."""
    return digest(np.asarray(ids, dtype="<i8").tobytes())
