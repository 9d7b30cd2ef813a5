"""The load controllers of CacheBlend (arXiv 2405.16444) and CacheTune (arXiv 2605.24022) as a budget.

While stored keys and values are being loaded, the processor can recompute tokens. The ratio at which both take equally
long is the best that speed allows: below it the processor waits for the store, above it the store for the processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import median

import torch

from qcfuse_rag.fuse.budget import FixedRatio
from qcfuse_rag.fuse.costs import load_times, prefill_once, timed
from qcfuse_rag.model.language_model import LanguageModel
from qcfuse_rag.store.contract import KVStore

MINIMUM = 0.15
"""Share below which quality suffers, by both papers."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Recompute as many tokens as loading the others takes anyway, and at least what quality needs.

    Of N tokens, recomputing `r N` takes `r N t_c` and loading the others `(1 - r) N t_i`; both are equal at
    `r = t_i / (t_c + t_i)` (CacheTune). A fast processor or a slow store raises the ratio, a fast store lowers it to
    the minimum. The engine reads while it computes, but places what it read in the same thread: a part of loading stays
    in the way, which the times below contain.

    Attributes:
        load_s_per_token: seconds to load a token's keys and values, `t_i`.
        compute_s_per_token: seconds to recompute a token, `t_c`.
        minimum: least fraction in [0, 1] to recompute.
    """

    load_s_per_token: float
    compute_s_per_token: float
    minimum: float = MINIMUM

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= 1:
            raise ValueError(f"minimum must be a fraction in [0, 1], got {self.minimum}")
        if self.load_s_per_token < 0 or self.compute_s_per_token <= 0:
            raise ValueError(
                f"loading a token cannot take {self.load_s_per_token} s, "
                f"nor computing one {self.compute_s_per_token} s; measure them with `calibrate`"
            )

    @property
    def balance(self) -> float:
        """The fraction at which recomputing takes as long as loading the rest."""
        return self.load_s_per_token / (self.compute_s_per_token + self.load_s_per_token)

    @property
    def ratio(self) -> float:
        """The balance, or the minimum if that is more."""
        return max(self.minimum, self.balance)

    def tokens(self, reused_tokens: int) -> int:
        """Return how many of `reused_tokens` to recompute."""
        return FixedRatio(self.ratio).tokens(reused_tokens)


@torch.inference_mode()
def calibrate(
    lm: LanguageModel,
    store: KVStore,
    *,
    minimum: float = MINIMUM,
    samples: int = 5,
    sizes: tuple[int, int] = (64, 256),
) -> Roofline:
    """Measure what a token costs to compute and to load, here and now.

    A row's cost is the difference between two prefills, which leaves out what a pass costs whatever its size. A token's
    load is timed over chunks that are in the store, each read once from the tier it is in and copied to the model's
    device: what the operating system still has in memory is read as fast as it will be next time.

    Args:
        lm: the model.
        store: with passages of this model, on the device whose speed is wanted; nothing is changed in it.
        minimum: see `Roofline`.
        samples: how often to measure either; the medians count.
        sizes: rows of the smaller and the larger prefill.

    Raises:
        ValueError: if the store has no passages of this model that can be read, or the sizes are not two that fit the
            window.
    """
    few, many = sizes
    if not 0 < few < many <= lm.window.tokens:
        raise ValueError(f"sizes must be two, ascending, within the window of {lm.window.tokens:,}, got {sizes}")
    loads = list(islice(load_times(lm, store), samples))
    if not loads:
        raise ValueError("the store has no passages of this model to measure loading by; warm some first")
    prefill_once(lm, many)  # the first pass of a process pays for much that later ones do not
    smaller, larger = (median(timed(lm, partial(prefill_once, lm, size)) for _ in range(samples)) for size in sizes)
    return Roofline(median(loads), max(larger - smaller, 1e-9) / (many - few), minimum)


def slowest_sufficient(
    devices: Sequence[tuple[str, float]], *, bytes_per_token: float, compute_s_per_token: float, ratio: float = MINIMUM
) -> str:
    """Choose where to store, as CacheBlend does: the slowest place whose loading hides behind recomputing.

    A slower place is taken to be a cheaper one. All tokens are loaded, `ratio` of them recomputed.

    Args:
        devices: names and bytes per second.
        bytes_per_token: such as `LanguageModel.kv_bytes_per_token`.
        compute_s_per_token: seconds to recompute a token, see `calibrate`.
        ratio: fraction of the tokens that is recomputed.

    Raises:
        ValueError: if none is fast enough.
    """
    hidden_s = ratio * compute_s_per_token
    sufficient = [(speed, name) for name, speed in devices if bytes_per_token <= hidden_s * speed]
    if not sufficient:
        fastest = max((speed for _, speed in devices), default=0.0)
        raise ValueError(
            f"no device loads {bytes_per_token:,.0f} bytes within {hidden_s:.3g} s, the fastest does {fastest:,.0f} a "
            "second; recompute more, or store in int8 or fp8"
        )
    return min(sufficient)[1]
