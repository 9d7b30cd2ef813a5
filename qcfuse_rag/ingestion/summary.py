"""The plan and the summary of a warming job."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WarmPlan:
    """The work that a warming job would do.

    Attributes:
        chunks: number of distinct chunks times bases.
        present: chunks that are stored already.
        to_warm: chunks to prefill.
        tokens: tokens of the chunks to prefill.
        size_bytes: bytes of the chunks to prefill in the store's last tier.
        seconds: estimated time of the prefill, from one measured batch; None if it was not measured.
        left_out: chunks that the store has no room for, the least wanted ones.
        failed: see `WarmSummary`.
        to_refresh: enriched chunks among those to prefill whose neighbours have changed.
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
    """The work that a warming job did.

    Attributes:
        chunks: number of distinct chunks times bases.
        warmed: chunks prefilled now.
        present: chunks that were stored already.
        left_out: chunks not prefilled because the store has no room for them beside more wanted ones.
        tokens: tokens prefilled.
        computed_tokens: tokens computed for them, ranking instruction and padding included.
        size_bytes: bytes of keys and values written.
        elapsed_s: seconds.
        failed: `(index, reason)` of chunks that cannot be stored, by their first index in the job; questions over them
            prefill them each time.
        refreshed: enriched chunks among those prefilled whose neighbours had changed.
        stalest: largest share of current neighbours that an enriched chunk left in the store was not made from.
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
