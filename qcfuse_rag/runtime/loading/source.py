"""The interface between the layer loader and the chunks that it loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from qcfuse_rag.runtime.loading.host_to_device import TransferHandle
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import ChunkKV

SentLayers = tuple[range, TransferHandle | None]
"""Layers that were read, and the transfer of their blocks; None if they are used as they were read."""


class LateMissError(Exception):
    """Stored chunks that could not be read after a pass had begun; the request goes on without them.

    Attributes:
        misses: the reason for each chunk, by its position.
        corrupt: positions of the chunks whose bytes were damaged.
    """

    def __init__(self, misses: Mapping[int, Miss], corrupt: Sequence[int] = ()) -> None:
        super().__init__("; ".join(sorted({miss.reason for miss in misses.values()})))
        self.misses, self.corrupt = dict(misses), tuple(corrupt)


@dataclass(frozen=True, slots=True, eq=False)
class LoadingChunk:
    """A chunk to be loaded, and the position of its first token in the prompt."""

    start: int
    chunk: ChunkKV


class LayerSource(Protocol):
    """Some chunks of a request."""

    @property
    def starts(self) -> Sequence[int]:
        """Positions of the chunks."""

    @property
    def needs_thread(self) -> bool:
        """Whether reading can block. A thread then reads while a pass computes."""

    @property
    def joins_layers(self) -> bool:
        """Whether several layers may be placed by the same launch."""

    def read(self, layers: range) -> SentLayers:
        """Read the blocks of some layers and start to send them; the reading thread calls it.

        Raises:
            LateMissError: if a block cannot be read.
        """

    def place(self, sent: Sequence[SentLayers]) -> int:
        """Place layers that have been read, and return their bytes; the computing thread calls it.

        Raises:
            LateMissError: if the blocks do not fit.
        """

    def stop(self) -> None:
        """Drop what would keep memory alive, and read nothing more."""
