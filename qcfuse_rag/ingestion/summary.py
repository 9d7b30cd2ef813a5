"""What a warming job would do, and what it did."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WarmPlan:
    """What a warming job would do.

    Attributes:
        chunks: chunks asked for, times bases; repetitions count once.
        present: those in the store already.
        to_warm: those it would prefill.
        tokens: their tokens.
        size_bytes: bytes they would take in the store's last tier.
        seconds: how long their prefill would take, measured on one batch; None if that was not asked for.
        left_out: chunks for which the store has no room, the least wanted ones.
        failed: see `WarmSummary`.
        to_refresh: of those to prefill, enriched ones whose neighbours are others by now.
        stalest: see `WarmSummary`.
    """

    chunks: int
    present: int
    to_warm: int
    tokens: int
    size_bytes: int
    seconds: float | None
    left_out: int
    failed: tuple[tuple[int, str], ...]
    to_refresh: int = 0
    stalest: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class WarmSummary:
    """What a warming job did.

    Attributes:
        chunks: chunks asked for, times bases; repetitions count once.
        warmed: prefilled now.
        present: found in the store.
        left_out: not prefilled because the store has no room for them beside more wanted ones.
        tokens: tokens prefilled.
        computed_tokens: tokens computed for that, with the words that rank them and what batches were filled up with.
        size_bytes: bytes of keys and values written.
        elapsed_s: seconds.
        failed: `(index, reason)` of chunks that cannot be stored, by first index among those given; questions prefill
            them as they come.
        refreshed: of those prefilled, enriched ones whose neighbours were others by now.
        stalest: among enriched chunks left as they were, the largest share of present neighbours that one has not met.
    """

    chunks: int
    warmed: int
    present: int
    left_out: int
    tokens: int
    computed_tokens: int
    size_bytes: int
    elapsed_s: float
    failed: tuple[tuple[int, str], ...]
    refreshed: int = 0
    stalest: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        rates = {"tokens_per_s": self.tokens / self.elapsed_s if self.elapsed_s else 0.0}
        if self.warmed:
            rates |= {"s_per_chunk": self.elapsed_s / self.warmed, "bytes_per_chunk": self.size_bytes / self.warmed}
        return {**asdict(self), **rates}
