"""A prompt as an ordered list of segments of token ids.

Nothing is joined as text and tokenised again: the ids of the prompt are the concatenation of the ids of its segments,
and every method, full prefill included, sees the same ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class Role(StrEnum):
    """What a segment is, hence what may be done with it."""

    HEAD = "head"  # fixed text before the first chunk; may be stored
    CHUNK = "chunk"  # a retrieved passage; may be stored
    QUESTION = "question"  # never stored
    TEXT = "text"  # anything else, such as earlier turns or the answer's header; never stored


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """What a segment is a part of.

    Attributes:
        ids: token ids of the whole chunk, by which it is stored.
        start: index among them of the segment's first.
    """

    ids: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt: its role, its token ids and the text they came from.

    Attributes:
        part: of which chunk it is a part; None if it is whole.
    """

    role: Role
    ids: tuple[int, ...]
    text: str
    part: ChunkPart | None = None

    @property
    def stored_ids(self) -> tuple[int, ...]:
        """The token ids by which it is stored."""
        return self.ids if self.part is None else self.part.ids


@dataclass(frozen=True, slots=True)
class Span:
    """Where a segment lies in the prompt: positions `start <= p < stop`."""

    start: int
    stop: int
    segment: Segment

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Prompt:
    """Segments in order, and the frame their chunks were warmed behind.

    Attributes:
        segments: not empty; the last one is text, since something must be computed afresh to answer.
        prefix_ids: ids of the template's fixed head, which framed chunks are keyed by. Usually those of the first segment.
        joined: whether it was put together elsewhere, so that its text may hold passages nobody knows of.
        note: why no passages were found in it while it was put together, for the report; None if some were, or were
            given.

    Raises:
        ValueError: if the segments cannot be a prompt.
    """

    segments: tuple[Segment, ...]
    prefix_ids: tuple[int, ...] = ()
    note: str | None = None
    joined: bool = False

    def __post_init__(self) -> None:
        kept = tuple(segment for segment in self.segments if segment.ids)
        object.__setattr__(self, "segments", kept)
        if not kept or kept[-1].role in (Role.CHUNK, Role.HEAD):
            raise ValueError("a prompt must end with text that is not stored, such as the question")
        if any(segment.role is Role.HEAD for segment in kept[1:]):
            raise ValueError("only the first segment of a prompt can be its head")

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """Token ids of the whole prompt."""
        return tuple(token for segment in self.segments for token in segment.ids)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Every segment with its place."""
        spans, start = [], 0
        for segment in self.segments:
            spans.append(Span(start, start + len(segment.ids), segment))
            start += len(segment.ids)
        return tuple(spans)

    @property
    def chunks(self) -> tuple[Span, ...]:
        """The retrieved passages."""
        return tuple(span for span in self.spans if span.segment.role is Role.CHUNK)

    def __len__(self) -> int:
        return len(self.ids)
