"""Budgets: the number of reused tokens that a method may recompute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Budget(Protocol):
    """The number of reused passage tokens to recompute."""

    @property
    def ratio(self) -> float:
        """The budget as a fraction in [0, 1]."""
        ...

    def tokens(self, reused_tokens: int) -> int:
        """Return the number of `reused_tokens` to recompute."""
        ...


@dataclass(frozen=True, slots=True)
class FixedRatio:
    """A fixed share of the reused passage tokens.

    Attributes:
        ratio: fraction in [0, 1].
    """

    ratio: float

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio must be a fraction in [0, 1], got {self.ratio}")

    def tokens(self, reused_tokens: int) -> int:
        """Return the number of `reused_tokens` to recompute: at least one unless the ratio is 0."""
        if self.ratio == 0 or reused_tokens == 0:
            return 0
        return max(1, int(self.ratio * reused_tokens))


@dataclass(frozen=True, slots=True)
class VerifiedRatio:
    """The ratio that the verdict beside the store recommends; `FusionEngine.load` puts that `FixedRatio` in its place.

    Attributes:
        default: fraction in [0, 1] until there is a verdict.
    """

    default: float

    @property
    def ratio(self) -> float:
        """The default."""
        return self.default

    def tokens(self, reused_tokens: int) -> int:
        """Return the number of `reused_tokens` to recompute at the default ratio."""
        return FixedRatio(self.default).tokens(reused_tokens)


Ratio = FixedRatio | VerifiedRatio
"""The budgets that are a share of the reused tokens."""
