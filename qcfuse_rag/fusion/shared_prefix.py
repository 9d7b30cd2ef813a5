"""The common beginning of two prompts, kept from one to the next so that it is loaded or computed once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from qcfuse_rag.fusion.report import Lookup
from qcfuse_rag.fusion.state import FusedPrompt, PlacedChunk


@dataclass(slots=True, eq=False)
class SharedPrefix:
    """Leading segments of one prompt, handed on to the next.

    The kept state is that before any recomputation (see `FusedPrompt`), or, where nothing is reused, the state after
    it. The caller ensures that both prompts begin with the same segments and system prefix and use the same method.

    Attributes:
        keep: tokens of the current prompt to keep for the next, the length of whole segments; 0 for none.
        held: tokens kept of the previous prompt; the current prompt begins with the same.
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
        """Copy the kept tokens to the beginning of an empty fused prompt; no bytes are loaded or counted."""
        if self._known is None or not self.held:
            return
        buffer, n = fused.await_all(), self.held
        for kept, target in zip((*self._keys, *self._values), (*buffer.keys, *buffer.values), strict=True):
            target[:, :, :n] = kept[:, :, :n]
        fused.known[:n] = self._known[:n]
        fused.placed += [placed for placed in self._placed if placed.span.stop <= n]
        fused.lookups += [lookup for lookup in self._lookups if lookup.start + lookup.tokens <= n]

    @torch.inference_mode()
    def take(self, fused: FusedPrompt, known: Tensor) -> None:
        """Keep the first `keep` tokens of a fused prompt, in place of the tokens kept before.

        Args:
            fused: the current prompt.
            known: `[T]` bool, positions whose keys and values the next prompt may reuse.
        """
        if not self.keep and not self.held:
            return
        n, buffer = self.keep, fused.await_all()
        if not 0 < n <= self.held:  # otherwise they are kept already
            self._keys = [keys[:, :, :n].clone() for keys in buffer.keys] if n else []
            self._values = [values[:, :, :n].clone() for values in buffer.values] if n else []
            self._known = known[:n].clone()
        self._placed, self._lookups = list(fused.placed), list(fused.lookups)
        self.held = n
