"""What happened in one fused prefill: plain data for people, logs and JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

UNSOUGHT = "no passages were looked for"
"""How a fallback begins where nothing was looked for in a text; why follows a colon."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What became of one segment that may be stored.

    Attributes:
        role: `head` or `chunk`.
        start: its position in the prompt.
        tokens: its length.
        hit: whether its keys and values were reused.
        reason: why not, if they were not.
        note: what was done to them before they were placed, if anything.
    """

    role: str
    start: int
    tokens: int
    hit: bool
    reason: str | None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time to the first token went, in seconds.

    Attributes:
        load_s: finding stored keys and values, waiting for them, copying and rotating them, whatever else belongs to
            no stage; not what is read and checked while rows are computed.
        probe_s: scoring tokens by the question, without waiting.
        select_s: turning scores into rows.
        recompute_s: computing the rows and the first token's logits, without waiting.
    """

    load_s: float = 0.0
    probe_s: float = 0.0
    select_s: float = 0.0
    recompute_s: float = 0.0

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage, in order."""
        return {"load": self.load_s, "probe": self.probe_s, "select": self.select_s, "recompute": self.recompute_s}

    @property
    def ttft_s(self) -> float:
        """Seconds from the finished prompt to the first token's logits."""
        return sum(self.stages.values())


@dataclass(frozen=True, slots=True)
class FusionReport:
    """What one fused prefill did.

    Attributes:
        method: name of the method.
        base: base of the reused chunks, or None.
        ratio: the method's recompute ratio, a fraction of the reused passage tokens that are not exact as they stand;
            the fraction that came of it for methods that count tokens instead.
        prompt_tokens: length of the prompt.
        context_tokens: tokens of its passages.
        reused_tokens: tokens whose stored keys and values stand in the final cache.
        rows: tokens computed, the question's included; of passes that let go of rows on their way, those left in the
            last layer.
        selected: positions of reused tokens that were recomputed after all.
        row_layers: rows summed over the layers each was computed in, probes and rows that were let go of included: what
            was paid. Full prefill pays `prompt_tokens` times `n_layers`.
        n_layers: layers of the model.
        lookups: what became of the head and of every passage.
        bytes_loaded: bytes read from the store.
        timings: where the time went.
        fallback: why the request fell back to full prefill of some or all passages, or None.
    """

    method: str
    base: str | None
    ratio: float
    prompt_tokens: int
    context_tokens: int
    reused_tokens: int
    rows: int
    selected: tuple[int, ...] = field(repr=False)
    row_layers: int
    n_layers: int
    lookups: tuple[Lookup, ...]
    bytes_loaded: int
    timings: Timings
    fallback: str | None

    @property
    def work(self) -> float:
        """Rows computed, over all layers, probes included, as a share of what full prefill computes."""
        return self.row_layers / (self.prompt_tokens * self.n_layers)

    @property
    def missing(self) -> tuple[Lookup, ...]:
        """Lookups that found nothing usable."""
        return tuple(lookup for lookup in self.lookups if not lookup.hit)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        data = asdict(self)
        data["timings"]["ttft_s"] = self.timings.ttft_s
        return data


def describe_misses(lookups: list[Lookup]) -> str | None:
    """Say in one line what had to be computed in full and why, or None if everything was found."""
    missing = [lookup for lookup in lookups if not lookup.hit and lookup.role == "chunk"]
    if not missing:
        return None
    total = sum(lookup.role == "chunk" for lookup in lookups)
    reasons = sorted({lookup.reason or "absent" for lookup in missing})
    return f"{len(missing)} of {total} passages computed in full: {'; '.join(reasons)}"
