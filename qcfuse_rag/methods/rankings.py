"""Other rankings of a chunk's tokens than by an instruction, for QCFuse's anchors; each is a base of its own.

- `kvzip`: the instruction is followed by the chunk again, whose tokens count too (Kim et al., arXiv 2505.23416).
  Doubles the work of warming. The paper asks about long texts in pieces of 2,048 tokens; here a chunk is one piece.
- `knorm`: tokens with smaller keys get more attention (Devoto et al., arXiv 2406.11430).
- `sinks`: the first tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from qcfuse_rag.ingestion.batches import prefill_batch
from qcfuse_rag.ingestion.extension import ComputedBase
from qcfuse_rag.ingestion.prefill import Batch, Ids, PrefillTarget
from qcfuse_rag.methods.common import order_by_key_norm
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import Base

Ranking = Literal["instruction", "kvzip", "knorm", "sinks"]


@dataclass(frozen=True, slots=True)
class RankedBase(ComputedBase):
    """A base with another ranking of tokens; it is its own `Ranker`. Its entries have the same keys and values."""

    plain: Base | None = None
    ranking: Ranking = "instruction"

    def prefix(self, prefix_ids: Ids) -> Ids:
        """Return the token ids in front of a chunk of the plain base."""
        return prefix_ids if self.plain is None else self.plain.prefix(prefix_ids)

    def compute(self, target: PrefillTarget, batch: Batch, system_prefix: ChunkKV | None) -> list[ChunkKV]:
        """Prefill chunks as the plain base does."""
        return prefill_batch(target, batch, system_prefix, ranker=self)

    def query(self, instruction: Ids, ids: Ids) -> Ids:
        """Return the token ids behind a chunk whose attention ranks it."""
        return instruction + ids if self.ranking == "kvzip" else ()

    def order(self, keys: Sequence[Tensor], attention: Tensor) -> Tensor:
        """Return `[n_layers, n_tokens]` int32, token indices by falling importance."""
        if self.ranking == "kvzip":
            return attention
        if self.ranking == "knorm":
            return order_by_key_norm(keys)
        return torch.arange(attention.shape[1], dtype=torch.int32).expand(len(attention), -1)


def ranked(base: Base, ranking: Ranking) -> Base:
    """Return a base with another ranking of tokens.

    Raises:
        ValueError: if a method computes the base itself.
    """
    if ranking == "instruction":
        return base
    if isinstance(base, ComputedBase):
        raise ValueError(f"tokens of the base {base.name!r} are ranked by the instruction alone")
    name = f"{base.name}+{ranking}"
    return RankedBase(name, base.after_prefix, base.primed, False, base.revision, plain=base, ranking=ranking)


kvzip, knorm, sinks = (partial(ranked, ranking=name) for name in ("kvzip", "knorm", "sinks"))
