"""What takes the place of a module in a view of a model."""

from __future__ import annotations

from typing import Any

from torch import nn


class StandIn(nn.Module):
    """Stands for a module, and answers for it.

    Args:
        inner: the module.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        """Ask the module inside: decoders ask layers for their kind of attention, some models a norm for its weight."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)
