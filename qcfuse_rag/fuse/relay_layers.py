"""The three layers at which RelayCaching (arXiv 2603.13289) changes what it does, and how they are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from qcfuse_rag.fuse.buffer import KVBuffer
from qcfuse_rag.fuse.forward import forward_hidden
from qcfuse_rag.fuse.rows import RowsPlan
from qcfuse_rag.model.language_model import LanguageModel


@dataclass(frozen=True, slots=True)
class RelayLayers:
    """Where a generated text's keys and values begin to deviate, are looked at, and cease to.

    Attributes:
        start: layers below it keep what is stored.
        detect: from `start` to here all tokens are recomputed; here some are chosen.
        end: the chosen ones are recomputed up to this layer, it included; layers above keep what is stored.

    Raises:
        ValueError: if they are not `0 <= start <= detect <= end`.
    """

    start: int
    detect: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.detect <= self.end:
            raise ValueError(f"layers must be 0 <= start <= detect <= end, got {self.start}, {self.detect}, {self.end}")

    @classmethod
    def by_depth(cls, n_layers: int) -> Self:
        """Guess: the middle half of the depth deviates, which one layer shows."""
        start = n_layers // 4
        detect = min(start + 1, n_layers - 1)
        return cls(start, detect, max(detect, min(3 * n_layers // 4, n_layers - 1)))

    @classmethod
    def of(cls, cosines: Tensor) -> Self:
        """Find the layers from how alike values are: from the first to the last that deviates more than the mean does.

        The choice is made one layer behind the first, where the deviation of single tokens has begun to show.

        Args:
            cosines: `[n_layers]`, from `value_cosines`; lower in the middle.
        """
        above = (cosines <= cosines.mean()).nonzero()[:, 0].tolist()
        return cls(above[0], min(above[0] + 1, above[-1]), above[-1])


@dataclass(frozen=True, slots=True)
class Relayed:
    """A generated text seen twice.

    Attributes:
        ids: its token ids.
        then: token ids it was generated behind.
        now: token ids in front of it in the prompt that reuses it.
    """

    ids: tuple[int, ...]
    then: tuple[int, ...]
    now: tuple[int, ...]


def calibrate(lm: LanguageModel, samples: Sequence[Relayed]) -> RelayLayers:
    """Find a model's three layers from a few generated texts; give the result to `methods.relaycaching`.

    The paper picks them from such a curve over depth, which sags in the middle. The rule in `RelayLayers.of` is ours.
    """
    return RelayLayers.of(value_cosines(lm, samples))


@torch.inference_mode()
def value_cosines(lm: LanguageModel, samples: Sequence[Relayed]) -> Tensor:
    """Return how alike a text's values are behind two different prompts.

    Args:
        lm: the model.
        samples: at least one.

    Returns:
        `[n_layers]` float32, mean cosine over tokens of all samples.
    """
    alike = []
    for sample in samples:
        then, now = _values(lm, sample.then, sample.ids), _values(lm, sample.now, sample.ids)
        alike.append(torch.stack([token_cosines(old, new) for old, new in zip(then, now, strict=True)]))
    return torch.cat(alike, dim=1).mean(1)


def token_cosines(one: Tensor, other: Tensor) -> Tensor:
    """Return `[n]` float32, the cosine of each token's values `[1, Hkv, n, D]` over all heads."""
    return functional.cosine_similarity(_flat(one), _flat(other), dim=-1)


def _flat(values: Tensor) -> Tensor:
    return values[0].transpose(0, 1).flatten(1).float()


def _values(lm: LanguageModel, before: tuple[int, ...], ids: tuple[int, ...]) -> list[Tensor]:
    """Return per layer `[1, Hkv, n, D]`, the values of `ids` behind `before`."""
    whole = torch.tensor(before + ids, device=lm.device)
    buffer = KVBuffer.allocate(lm.shapes, len(whole), dtype=lm.dtype, device=lm.device)
    plan = RowsPlan.between(0, len(whole), lm.device, lm.sliding)
    forward_hidden(lm, whole, plan, buffer, depth=lm.n_layers)
    return [values[:, :, len(before) :] for values in buffer.values]
