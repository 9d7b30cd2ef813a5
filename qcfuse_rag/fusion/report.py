"""The report of one fused prefill: plain data for people, logs and JSON; and a warning where reports say too little."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from qcfuse_rag.errors import StoreError


@dataclass(frozen=True, slots=True)
class Lookup:
    """The outcome of looking up one segment.

    Attributes:
        role: `system_prefix` or `chunk`.
        start: its position in the prompt.
        tokens: its length.
        hit: whether its keys and values were reused.
        reason: why they were not reused, or None.
        note: how an adapter changed them, or None.
        exact: whether the reused keys and values are those of full prefill, so that nothing needs recomputing.
        passage: the number of its passage among those of the prompt, the same for all parts of one; None for the
            system prefix.
    """

    role: str
    start: int
    tokens: int
    hit: bool
    reason: str | None
    note: str | None = None
    exact: bool = False
    passage: int | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """The stages of the time to the first token, in seconds.

    Attributes:
        load_s: finding stored keys and values, waiting for them, copying and rotating them, and work of no other
            stage; reading and checking that overlaps with computing does not count.
        probe_s: scoring tokens by the question, without waiting.
        select_s: turning scores into rows.
        recompute_s: computing the rows and the first token's logits, without waiting.
        others_s: between parts of the prefill, computing parts and steps of other requests.
    """

    load_s: float = 0.0
    probe_s: float = 0.0
    select_s: float = 0.0
    recompute_s: float = 0.0
    others_s: float = 0.0

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage, in order; `others` only if other requests ran in between."""
        stages = {field.name.removesuffix("_s"): getattr(self, field.name) for field in fields(self)}
        return stages if self.others_s else {name: stages[name] for name in stages if name != "others"}

    @property
    def ttft_s(self) -> float:
        """Seconds from the beginning of the prefill to the first token's logits; waiting in a queue comes before."""
        return sum(self.stages.values())


@dataclass(frozen=True, slots=True)
class FusionReport:
    """The result of one fused prefill.

    Attributes:
        method: name of the method.
        base: base of the reused chunks, or None.
        ratio: the method's recompute ratio, a fraction of the reused passage tokens that are not exact; for methods
            that count tokens instead, the resulting fraction.
        prompt_tokens: length of the prompt.
        context_tokens: tokens of its passages.
        reused_tokens: tokens whose keys and values were reused and not recomputed.
        prefix_tokens: how many of these are the beginning that an earlier request of this engine has computed; the
            others came from the store.
        rows: tokens computed, the question's included; of passes that drop rows between layers, the rows of the last
            layer.
        selected: positions of reused tokens that were recomputed.
        row_layers: rows summed over the layers each was computed in, probes and dropped rows included: the work done.
            Full prefill computes `prompt_tokens` times `n_layers`.
        n_layers: layers of the model that have keys and values of their own.
        lookups: the outcome for the system prefix and every passage.
        bytes_loaded: bytes read from the store.
        timings: seconds by stage.
        fallback: why the request fell back to full prefill of some or all passages, or None.
        predicted_s: seconds to the first token that the costs of the method's guard predict for what was done, to be
            compared with `timings.ttft_s` less `timings.others_s`; None without a guard, and if it was not asked.
        answer_limit: why the answer may have fewer tokens than were asked for; None if it may have all.
        passages: passages that were given, or of which parts were recognised in the text.
        passages_reused: how many of these the store had.
        stored_tokens: how many of their tokens it had.
        unrecognised_tokens: tokens of texts as long as passages in which none was found; not in a prompt that continues
            an earlier one.
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
    predicted_s: float | None = None
    prefix_tokens: int = 0
    answer_limit: str | None = None
    passages: int = 0
    passages_reused: int = 0
    stored_tokens: int = 0
    unrecognised_tokens: int = 0

    @property
    def reuse(self) -> str:
        """One line on what was reused, and why the rest was not."""
        tokens = f"{self.stored_tokens:,} of {self.context_tokens:,} tokens"
        passages = f"{self.passages_reused} of {self.passages} passages reused, {tokens}"
        parts = [passages if self.passages else "no passages"]
        parts += [f"{self.prefix_tokens:,} tokens continued"] if self.prefix_tokens else []
        return "; ".join(
            filter(None, [", ".join(parts), self.fallback, describe_unrecognised(self.unrecognised_tokens)])
        )

    @property
    def work(self) -> float:
        """Rows computed over all layers, probes included, as a share of full prefill's."""
        return self.row_layers / (self.prompt_tokens * self.n_layers)

    @property
    def missing(self) -> tuple[Lookup, ...]:
        """The lookups that are misses."""
        return tuple(lookup for lookup in self.lookups if not lookup.hit)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        data = asdict(self)
        data["timings"]["ttft_s"] = self.timings.ttft_s
        return {**data, "reuse": self.reuse}


WINDOW_ENDS = "no more fit the context window"


def describe_limit(room: int, asked: int, reason: str = WINDOW_ENDS) -> str:
    """Say in one line that an answer may have fewer tokens than were asked for."""
    return f"the answer may have {room:,} tokens instead of {asked:,}: {reason}"


def describe_misses(lookups: Sequence[Lookup]) -> str | None:
    """Say in one line how many passages were computed in full and why; None if all were found."""
    passages = [lookup for lookup in lookups if lookup.role == "chunk"]
    missing = [lookup for lookup in passages if not lookup.hit]
    if not missing:
        return None
    counts = [len({lookup.passage for lookup in some}) for some in (missing, passages)]
    reasons = sorted({lookup.reason or "absent" for lookup in missing})
    return f"{counts[0]} of {counts[1]} passages computed in full: {'; '.join(reasons)}"


PASSAGE = 256
"""Tokens of a usual passage."""


def describe_unrecognised(tokens: int) -> str | None:
    """Say in one line that long texts of a prompt are not in the store; None if there are none."""
    worth = max(1, round(tokens / PASSAGE))
    what = f"{worth} passages' worth" if worth > 1 else "a passage's worth"
    return f"{what} of text, {tokens:,} tokens, is not in the store: never warmed, or changed since" if tokens else None


PROMPTS = 20
"""How many prompts are looked at."""
LITTLE = 0.2
"""A share of their passages' tokens that is too little."""

LOG = logging.getLogger(__name__)


class ReuseMonitor:
    """Looks at the last prompts of an engine. `stored_passages` counts those that could be recognised.

    Safe to use from several threads.
    """

    def __init__(self, stored_passages: Callable[[], int]) -> None:
        self._stored_passages = stored_passages
        self._last: deque[FusionReport] = deque(maxlen=PROMPTS)
        self._warned = False
        self._lock = threading.Lock()

    def note(self, report: FusionReport) -> None:
        """Look at a prompt with passages, or with text that may be some."""
        asked_in_full = report.base is None and report.fallback is None
        if asked_in_full or not (report.passages or report.unrecognised_tokens):
            return
        with self._lock:
            self._last.append(report)
            last = list(self._last)
        reused = sum(report.stored_tokens + report.prefix_tokens for report in last)
        tokens = sum(report.context_tokens + report.unrecognised_tokens for report in last)
        if self._warned or len(last) < PROMPTS or reused >= LITTLE * tokens:
            return
        try:
            stored = self._stored_passages()
        except StoreError:
            return
        with self._lock:
            warned, self._warned = self._warned, self._warned or stored > 0
        if stored and not warned:
            told = (report.fallback or describe_unrecognised(report.unrecognised_tokens) for report in last)
            reasons = Counter(reason.split("; ")[0] for reason in told if reason)
            reason, count = next(iter(reasons.most_common(1)), ("by the method", PROMPTS))
            LOG.warning(
                "only %d %% of the last %d prompts was reused, although %d passages are stored; %d times: %s",
                round(100 * reused / tokens),
                PROMPTS,
                stored,
                count,
                reason,
            )
