"""Look up the stored chunks of a prompt: each outcome is a chunk to place, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.fusion.adapters import AdaptedChunk, Adapter, PlacementContext
from qcfuse_rag.prompts.segments import Prompt, Role, Span
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore, Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.prefill_base import BASES, BLIND, Base

ABSENT = Miss("absent")


@dataclass(frozen=True, slots=True)
class SegmentLookup:
    """A segment to look up: its positions, its key, the base of the key, and what adapts the chunk."""

    span: Span
    key: ChunkKey
    base: Base
    adapter: Adapter | None


def segments_to_look_up(
    lm: LanguageModel, prompt: Prompt, base: Base, adapter: Adapter | None, start: int
) -> list[SegmentLookup]:
    """List the system prefix and the passages from `start` on.

    The system prefix is stored blind: at position 0 that is exact.
    """
    return [
        SegmentLookup(span, _key(lm, prompt, span, BLIND), BLIND, None)
        if span.segment.role is Role.SYSTEM_PREFIX
        else SegmentLookup(span, _key(lm, prompt, span, base), base, adapter)
        for span in prompt.spans
        if span.start >= start and span.segment.role in (Role.SYSTEM_PREFIX, Role.CHUNK)
    ]


def look_up_segments(
    lm: LanguageModel,
    store: KVStore,
    prompt: Prompt,
    segments: Sequence[SegmentLookup],
    refused: Mapping[int, Miss],
) -> list[AdaptedChunk | Miss]:
    """Return the chunk to place for each segment, or why there is none.

    Args:
        lm: the model.
        store: the store.
        prompt: the prompt.
        segments: its segments.
        refused: chunks not to look up, by their positions, and why.
    """
    return [refused.get(segment.span.start) or _look_up(lm, store, prompt, segment) for segment in segments]


def _look_up(lm: LanguageModel, store: KVStore, prompt: Prompt, segment: SegmentLookup) -> AdaptedChunk | Miss:
    span, base = segment.span, segment.base
    chunk = store.get(segment.key)
    if segment.adapter is not None:
        adapted = segment.adapter.adapt(PlacementContext(lm, store, prompt, span, base), chunk)
    elif isinstance(chunk, ChunkKV):
        adapted = AdaptedChunk(chunk, base.exact_at(span.start, prompt.ids, prompt.prefix_ids))
    else:
        adapted = chunk
    if adapted == ABSENT:
        return _explain_absence(lm, store, prompt, segment)
    if isinstance(adapted, AdaptedChunk):
        try:
            # A probe reads these blocks when it is too late to wait for a store, so they are read here.
            adapted = replace(adapted, chunk=adapted.chunk.ready_to_probe())
        except CorruptEntry as error:
            store.discard(adapted.key or segment.key, str(error))
            return Miss(str(error))
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            return Miss(f"cannot be read: {error}")
    return adapted


def _explain_absence(lm: LanguageModel, store: KVStore, prompt: Prompt, segment: SegmentLookup) -> Miss:
    """Say whether a passage that is not stored under its base is stored under another."""
    others = [
        other.name
        for other in BASES.values()
        if other is not segment.base
        and segment.span.segment.role is Role.CHUNK
        and _key(lm, prompt, segment.span, other) in store
    ]
    return Miss(f"absent: stored {', '.join(others)}, not {segment.base.name}") if others else ABSENT


def _key(lm: LanguageModel, prompt: Prompt, span: Span, base: Base) -> ChunkKey:
    return base.key(lm.fingerprint, prompt.prefix_ids, span.segment.stored_ids)
