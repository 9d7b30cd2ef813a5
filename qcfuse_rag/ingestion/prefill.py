"""Prefill chunks once into keys and values for the store, and rank their tokens before any question is known.

The best tokens, the anchors, represent a chunk when a question probes it. An instruction to repeat the text follows the
chunk. A token's importance is the largest attention weight it gets from any token of the instruction in any head: the
light form of KVzip (Kim et al., arXiv 2505.23416) that QCFuse uses. Methods may rank otherwise, see `Ranker`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.runtime.attention.scores import attention_weights
from qcfuse_rag.runtime.forward import forward_hidden
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.learned_costs import LearnedCosts
from qcfuse_rag.runtime.placement import copy_chunk, rotate_buffer
from qcfuse_rag.runtime.rows import AttentionParams, RowsPlan
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.entry.codec import entry_bytes
from qcfuse_rag.store.key import Base, ChunkKey

Ids = tuple[int, ...]
"""Token ids of one text."""

INSTRUCTION = "\n\nRepeat the previous context exactly."
SINKS = 4
"""A chunk's first tokens, which lead every ranking, because attention gathers there when the chunk is read alone."""


class Ranker(Protocol):
    """Another ranking of a chunk's tokens than that by the instruction."""

    def query(self, instruction: Ids, ids: Ids) -> Ids:
        """Return the token ids behind a chunk whose attention ranks it; empty if none is needed."""
        ...

    def order(self, keys: Sequence[Tensor], attention: Tensor) -> Tensor:
        """Return `[n_layers, n_tokens]` int32, token indices by falling importance.

        Args:
            keys: per layer `[Hkv, n_tokens, D]`, unrotated.
            attention: `[n_layers, n_tokens]` int32, the tokens by the attention that the query pays to them.
        """
        ...


def prefill_chunk(lm: LanguageModel, ids: Ids, *, prefix: ChunkKV | None = None) -> ChunkKV:
    """Compute the keys and values of one chunk; see `prefill_chunks`."""
    return prefill_chunks(lm, [ids], prefix=prefix)[0]


@torch.inference_mode()
def prefill_chunks(
    lm: LanguageModel,
    batch: Sequence[Ids],
    *,
    prefix: ChunkKV | Sequence[ChunkKV] | None = None,
    ranker: Ranker | None = None,
) -> list[ChunkKV]:
    """Compute the keys and values of several chunks in one pass, and rank their tokens.

    Each chunk is a sequence of its own: prefix, chunk, query tokens that rank it, and padding. A token attends to
    nothing behind it, so query tokens and padding do not change a chunk's keys and values, except for the last bits,
    which depend on the shape of the pass.

    Args:
        lm: the model.
        batch: token ids of each chunk; similar lengths need less padding.
        prefix: stored keys and values in front of the chunks, from position 0: one for all chunks, or one for each
            chunk, all of the same length. None for no prefix.
        ranker: ranks the tokens; None ranks by the instruction.

    Returns:
        The chunks in the same order, on the model's device.

    Raises:
        PromptTooLong: if prefix and the longest chunk exceed the context window.
        ValueError: if prefixes differ in length.
    """
    prefixes = [prefix] if isinstance(prefix, ChunkKV) else list(prefix or ())
    if len({chunk.n_tokens for chunk in prefixes}) > 1 or (len(prefixes) > 1 and len(prefixes) != len(batch)):
        raise ValueError(f"{len(batch)} chunks need one prefix, or one each of the same length")
    start = prefixes[0].n_tokens if prefixes else 0
    longest = max(len(ids) for ids in batch)
    limit = lm.context_window.tokens
    spare = limit - start - longest
    if start >= limit:
        raise PromptTooLong(
            f"the text before the passage has {start:,} tokens, the context window {limit:,}; shorten it"
        )
    if spare < 0:
        raise PromptTooLong(
            f"a passage of {longest:,} tokens behind {start:,} exceeds the context window of {limit:,}; "
            "split the document into smaller passages"
        )
    instruction = instruction_ids(lm.tokenizer)
    queries = [(ranker.query(instruction, ids) if ranker else instruction)[:spare] for ids in batch]
    unpadded = [ids + query for ids, query in zip(batch, queries, strict=True)]
    width = max(map(len, unpadded))
    sequences = [ids + (0,) * (width - len(ids)) for ids in unpadded]
    buffer = lm.empty_buffer(start + width, batch=len(batch))
    for index, chunk in enumerate(prefixes):
        sequence = slice(None) if len(prefixes) == 1 else slice(index, index + 1)
        copy_chunk(buffer, 0, chunk, sequence, ropes=lm.ropes)
    attention = QueryAttention(lm.n_layers, start, list(map(len, batch)), list(map(len, queries)), lm.device)
    plan = RowsPlan.between(start, start + width, lm.device, lm.sliding, attention.observe)
    forward_hidden(lm, torch.tensor(sequences, device=lm.device), plan, buffer, depth=lm.n_layers)
    rotate_buffer(buffer, lm.ropes, start, start + longest, back=True)
    chunks = []
    for index, ids in enumerate(batch):
        keys = [layer[index, :, start : start + len(ids)] for layer in buffer.keys]
        values = [layer[index, :, start : start + len(ids)] for layer in buffer.values]
        order = attention.order(index)
        chunks.append(ChunkKV.of(keys, values, ranker.order(keys, order) if ranker else order))
    return chunks


def instruction_ids(tokenizer: PreTrainedTokenizerBase) -> Ids:
    """Return the token ids of the ranking instruction."""
    return tuple(tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"])


class QueryAttention:
    """Rank chunks' tokens by the attention of query tokens behind them, observed in one pass.

    The query tokens attend to the chunk's prefix, the chunk and themselves. All chunks begin at position `start`.
    """

    def __init__(
        self, n_layers: int, start: int, lengths: Sequence[int], query_lengths: Sequence[int], device: torch.device
    ) -> None:
        self._start, self._lengths, self._query_lengths = start, lengths, query_lengths
        self._importance = [torch.zeros(n_layers, length, device=device) for length in lengths]

    def observe(self, layer: int, query: Tensor, key: Tensor, params: AttentionParams) -> None:
        """Record the attention that the chunks get in one layer; the first row of `query` is their first token."""
        for index, (tokens, n_queries) in enumerate(zip(self._lengths, self._query_lengths, strict=True)):
            if not n_queries:
                continue
            first, stop = self._start + tokens, self._start + tokens + n_queries
            weights = attention_weights(
                query[index : index + 1, :, tokens : tokens + n_queries],
                key[index : index + 1, :, :stop],
                torch.arange(first, stop, device=query.device),
                torch.ones(stop, dtype=torch.bool, device=query.device),
                params,
                reduce="max",
            )
            self._importance[index][layer] = weights[self._start : first]

    def order(self, index: int) -> Tensor:
        """Return a chunk's tokens, `[n_layers, n_tokens]` int32 indices, most important first.

        A layer without attention has the order of all others together.
        """
        importance = self._importance[index]
        importance[~importance.any(1)] = importance.sum(0)
        importance[:, :SINKS] = torch.inf
        return importance.argsort(dim=1, descending=True, stable=True).to(torch.int32)


@dataclass(frozen=True)
class PrefillTarget:
    """A model, the store that its caches go to, and the fixed texts in front of chunks."""

    lm: LanguageModel
    store: KVStore
    prefix_ids: Ids  # of the system prefix
    primer: Ids = ()  # in front of primed chunks, see `ingestion.primer`; empty without primed bases
    costs: LearnedCosts | None = None  # learn from batches on a CPU

    @cached_property
    def primed_prefix(self) -> ChunkKV:
        """Keys and values in front of primed chunks: system prefix and primer, some 900 tokens.

        They are computed once for all jobs, so that a job of one passage does not take twice as long for them.
        """
        return prefill_chunk(self.lm, self.prefix_ids + self.primer)

    def key(self, base: Base, ids: Ids | str) -> ChunkKey:
        """Return the key of a chunk under a base."""
        return base.key(self.lm.fingerprint, self.prefix_ids, ids)

    def entry_bytes(self, n_tokens: int) -> int:
        """Return the size in bytes of a chunk's entry in the store."""
        return entry_bytes(self.lm.shapes, self.lm.dtype, self.store.kv_dtype, n_tokens)


@dataclass(frozen=True, slots=True)
class PendingChunk:
    """A chunk of a job under one base."""

    index: int  # its first among the job's chunks
    base: Base
    key: ChunkKey
    ids: array[int]  # four bytes each


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks to compute in one pass.

    Attributes:
        chunks: token ids of each chunk.
        origins: for a derived base, the token ids of the passages that each chunk's entry is made from, in their order;
            else empty.
        tokens_in_front: for a derived base, tokens in front of each chunk. Else 0.
    """

    base: Base
    chunks: tuple[Ids, ...]
    origins: tuple[tuple[Ids, ...], ...] = ()
    tokens_in_front: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens of all chunks."""
        return sum(map(len, self.chunks))
