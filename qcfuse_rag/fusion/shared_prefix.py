"""The beginning of a prompt, kept for the next one: what two prompts share is loaded or computed once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from qcfuse_rag.fusion.report import Lookup
from qcfuse_rag.fusion.state import FusedPrompt, PlacedChunk


@dataclass(slots=True, eq=False)
class SharedPrefix:
    """Leading segments of one prompt on their way to the next, one prefix at a time.

    What is kept is a prompt's state before any recomputation (see `FusedPrompt`), or, where nothing is reused, after it.
    The caller sees to it that prompts between which it is handed on begin alike, in segments and frame, and are
    brought to their first token by the same method.

    Attributes:
        keep: tokens of the prompt at hand to keep for the next, the length of whole segments; 0 for none.
        held: tokens kept of the prompt before; the prompt at hand begins with the same.
    """

    keep: int = 0
    held: int = 0
    _keys: list[Tensor] = field(default_factory=list)
    _values: list[Tensor] = field(default_factory=list)
    _known: Tensor | None = None
    _placed: list[PlacedChunk] = field(default_factory=list)
    _lookups: list[Lookup] = field(default_factory=list)

    @torch.inference_mode()
    def give(self, fused: FusedPrompt) -> None:
        """Copy what is held to the beginning of an empty fused prompt; nothing of it is loaded, so no bytes are counted."""
        if self._known is None or not self.held:
            return
        buffer, n = fused.await_all(), self.held
        for mine, yours in zip((*self._keys, *self._values), (*buffer.keys, *buffer.values), strict=True):
            yours[:, :, :n] = mine[:, :, :n]
        fused.known[:n] = self._known[:n]
        fused.placed += [placed for placed in self._placed if placed.span.stop <= n]
        fused.lookups += [lookup for lookup in self._lookups if lookup.start + lookup.tokens <= n]

    @torch.inference_mode()
    def take(self, fused: FusedPrompt, known: Tensor) -> None:
        """Hold the first `keep` tokens of a fused prompt instead of what was held.

        Args:
            fused: the prompt at hand.
            known: `[T]` bool, positions whose keys and values the next prompt may take over.
        """
        n, buffer = self.keep, fused.await_all()
        if not 0 < n <= self.held:  # else they are there already
            self._keys = [keys[:, :, :n].clone() for keys in buffer.keys] if n else []
            self._values = [values[:, :, :n].clone() for values in buffer.values] if n else []
            self._known = known[:n].clone()
        self._placed, self._lookups = list(fused.placed), list(fused.lookups)
        self.held = n
