"""Keys and values of finished requests, cached in memory for prompts that begin with the same tokens.

The next turn of a conversation begins like the last one: system message, tools, earlier turns with their passages and
answers. The longest such beginning is found by its token ids and copied, as in vLLM's automatic prefix caching. Behind
it, passages come from the store as ever. Nothing is written to disk, and the cache ends with its engine.

Keys and values that full prefill would give are right for every request. Those that were computed over reused caches
depend on the method and on which passages it reused, so only a request with the same method and the same passages in
the same places may have them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch
from numpy.typing import NDArray

from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.prompts.segments import Prompt, Role
from qcfuse_rag.runtime.buffer import KVBuffer

MIN_TOKENS = 16
"""Shorter beginnings are not worth a copy."""

MAX_UNUSED = 0.25
"""Share of a buffer that may be unused; a buffer with more is copied before it is cached."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedSequence:
    """A prompt and its answer with their keys and values.

    Attributes:
        ids: `[T]` int64, the tokens of the buffer.
        buffer: the keys and values, never written to again.
        exact_tokens: number of leading positions whose keys and values are full prefill's.
        method: the method that the request asked for.
        passages: first position and position behind the last of every passage, in order.
        prompt_tokens: how many of the tokens are the prompt's; the others are the answer's.
    """

    ids: NDArray[np.int64]
    buffer: KVBuffer
    exact_tokens: int
    method: Method
    passages: tuple[tuple[int, int], ...]
    prompt_tokens: int

    def __len__(self) -> int:
        return len(self.ids)

    def reusable_tokens(self, prompt: Prompt, ids: NDArray[np.int64], method: Method) -> int:
        """Return how many leading tokens a request with another prompt, of `ids` without the last one, may reuse.

        The last token is always computed. Passages and system prefixes are reused whole or not at all, since the store
        may have them.
        """
        common = common_length(self.ids, ids)
        exact = min(common, self.exact_tokens)
        if method.base is None:
            return exact
        exact = _whole_segments(prompt, exact)
        if not _same_method(self.method, method):
            return exact
        return max(exact, _whole_segments(prompt, self._same_passages(prompt, common)))

    def covers(self, other: CachedSequence, tokens: int) -> bool:
        """Return whether requests may reuse as many of the first `tokens` of this sequence as of those of `other`."""
        if self.exact_tokens < min(other.exact_tokens, tokens):
            return False
        if not np.array_equal(self.ids[:tokens], other.ids[:tokens]):
            return False
        if self.exact_tokens >= tokens:
            return True
        passages = tuple(passage for passage in self.passages if passage[0] < tokens)
        return _same_method(self.method, other.method) and passages == other.passages

    def _same_passages(self, prompt: Prompt, tokens: int) -> int:
        """Return how many of so many leading tokens come before the first passage that is not one of both prompts."""
        theirs = [(span.start, span.stop) for span in prompt.chunks if span.start < tokens]
        ours = [passage for passage in self.passages if passage[0] < tokens]
        for their, our in zip_longest(theirs, ours):
            if their != our:
                return min(passage[0] for passage in (their, our) if passage is not None)
        return tokens


class PrefixCache:
    """Caches sequences up to a limit, and drops those that were not used for the longest time.

    Safe to use from several threads.

    Args:
        limit_bytes: most bytes of keys and values; 0 caches nothing.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._sequences: list[CachedSequence] = []  # the one used last comes last
        self._epoch = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def nbytes(self) -> int:
        """Bytes of all cached keys and values."""
        return sum(sequence.buffer.nbytes for sequence in self._sequences)

    def lease(self, prompt: Prompt, method: Method) -> PrefixLease:
        """Find the longest beginning of a prompt that its request may reuse."""
        with self._lock:
            cached, tokens = self._longest(prompt, method)
            if cached is None:
                return PrefixLease(self, method, self._epoch)
            self._sequences = [*(other for other in self._sequences if other is not cached), cached]
            return PrefixLease(self, method, self._epoch, tokens, min(tokens, cached.exact_tokens), cached.buffer)

    def reusable_tokens(self, prompt: Prompt, method: Method) -> int:
        """Return how many leading tokens of a prompt its request may reuse at present."""
        with self._lock:
            return self._longest(prompt, method)[1]

    def put(self, sequence: CachedSequence, epoch: int) -> None:
        """Cache a sequence, in place of those whose prompts it covers.

        If a covered sequence has another answer, the keys and values of that answer are dropped. Chat templates rarely
        write an answer in the tokens that it was decoded in, so most turns of a conversation differ there from the turn
        before. A sequence is not cached if there was a clearing since its request began, in `epoch`.
        """
        with self._lock:
            if epoch != self._epoch or sequence.buffer.nbytes > self.limit_bytes:
                return
            covering = next((other for other in self._sequences if other.covers(sequence, len(sequence))), None)
            sequence = covering or sequence
            others = [other for other in self._sequences if not sequence.covers(other, other.prompt_tokens)]
            sequences = [*(other for other in others if other is not sequence), sequence]
            while sum(other.buffer.nbytes for other in sequences) > self.limit_bytes:
                sequences.pop(0)
            self._sequences = sequences  # at once: others read it without the lock

    def clear(self) -> None:
        """Drop all sequences, and cache no sequence of a request that has begun."""
        with self._lock:
            self._sequences, self._epoch = [], self._epoch + 1

    def _longest(self, prompt: Prompt, method: Method) -> tuple[CachedSequence | None, int]:
        if not self._sequences:
            return None, 0
        ids = np.array(prompt.ids[:-1], dtype=np.int64)
        lengths = [sequence.reusable_tokens(prompt, ids, method) for sequence in self._sequences]
        best = max(range(len(lengths)), key=lambda index: (lengths[index], self._sequences[index].exact_tokens))
        first = prompt.segments[0]
        stored = len(first.ids) if method.base is not None and first.role is Role.SYSTEM_PREFIX else 0
        if lengths[best] < max(MIN_TOKENS, stored + 1):
            return None, 0
        return self._sequences[best], lengths[best]


@dataclass(slots=True, eq=False)
class PrefixLease:
    """The beginning that a request reuses, and its place in the cache when it has ended.

    Attributes:
        cache: the cache.
        method: the method that the request asked for.
        epoch: number of clearings of the cache when the request began.
        held: number of leading tokens that are reused.
        exact_tokens: how many of them are full prefill's.
    """

    cache: PrefixCache
    method: Method
    epoch: int
    held: int = 0
    exact_tokens: int = 0
    _source: KVBuffer | None = None

    @torch.inference_mode()
    def give(self, fused: FusedPrompt) -> None:
        """Copy the reused tokens to the beginning of an empty fused prompt."""
        if self._source is None:
            return
        source, target, n = self._source, fused.await_all(), self.held
        for cached, fresh in zip((*source.keys, *source.values), (*target.keys, *target.values), strict=True):
            fresh[:, :, :n] = cached[:, :, :n]
        fused.known[:n] = True
        fused.prefix_tokens, fused.prefix_exact = n, self.exact_tokens

    def release(self) -> None:
        """Drop the reference to the reused keys and values; they were copied."""
        self._source = None

    @torch.inference_mode()
    def put(self, prompt: Prompt, answer: Sequence[int], buffer: KVBuffer, exact_tokens: int) -> None:
        """Cache a prompt and the tokens of its answer whose keys and values are in the buffer.

        Nothing is cached if the device has no memory for a copy.
        """
        ids = np.array([*prompt.ids, *answer], dtype=np.int64)
        if len(ids) < (1 - MAX_UNUSED) * buffer.capacity:
            try:
                buffer = KVBuffer(
                    tuple(keys[:, :, : len(ids)].clone() for keys in buffer.keys),
                    tuple(values[:, :, : len(ids)].clone() for values in buffer.values),
                )
            except torch.OutOfMemoryError:
                return
        passages = tuple((span.start, span.stop) for span in prompt.chunks)
        held = KVBuffer(buffer.keys, buffer.values)
        self.cache.put(CachedSequence(ids, held, exact_tokens, self.method, passages, len(prompt)), self.epoch)


def _same_method(method: Method, other: Method) -> bool:
    return method is other or method == other


def common_length(ids: NDArray[np.int64], other_ids: NDArray[np.int64]) -> int:
    """Return the number of leading tokens that two sequences share."""
    n = min(len(ids), len(other_ids))
    different = ids[:n] != other_ids[:n]
    first = int(different.argmax()) if n else 0
    return first if n and different[first] else n


def _whole_segments(prompt: Prompt, tokens: int) -> int:
    """Return the largest number of leading tokens, at most so many, that ends in no reusable segment."""
    for span in prompt.spans:
        if span.segment.role in (Role.SYSTEM_PREFIX, Role.CHUNK) and span.start < tokens < span.stop:
            return span.start
    return tokens
