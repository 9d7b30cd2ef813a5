"""A prompt as an ordered list of segments of token ids.

Segments are never joined as text and tokenised again: a prompt's ids are the concatenation of its segments' ids, and
every method, full prefill included, sees the same ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, pairwise

from qcfuse_rag.store.key import hash_ids


class Role(StrEnum):
    """The kind of a segment, which decides whether it may be stored."""

    SYSTEM_PREFIX = "system_prefix"  # fixed text, system message and tools before all else; may be stored
    CHUNK = "chunk"  # a retrieved passage; may be stored
    QUESTION = "question"  # never stored
    TEXT = "text"  # other text, such as earlier turns or the answer's header; never stored


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """The place of a segment in a stored chunk.

    Attributes:
        ids_hash: `hash_ids` of the chunk's token ids, by which it is stored.
        n_tokens: their number.
        start: the first of them that the segment has.
    """

    ids_hash: str
    n_tokens: int
    start: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt: its role, its token ids, the text they came from, and the chunk that it is a part of."""

    role: Role
    ids: tuple[int, ...]
    text: str
    part: ChunkPart | None = None

    @property
    def ids_hash(self) -> str:
        """The hash of token ids under which the segment, or the chunk that it is a part of, is stored."""
        return hash_ids(self.ids) if self.part is None else self.part.ids_hash

    @property
    def is_cut(self) -> bool:
        """Whether the segment is shorter than its chunk."""
        return self.part is not None and len(self.ids) < self.part.n_tokens


@dataclass(frozen=True, slots=True)
class Span:
    """A segment and its positions `start <= p < stop` in the prompt."""

    start: int
    stop: int
    segment: Segment

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Prompt:
    """Segments in order, and the system prefix after which their chunks were warmed.

    Raises:
        ValueError: if the segments cannot be a prompt.
    """

    segments: tuple[Segment, ...]  # not empty; the last one is not stored, because an answer needs a computed row
    prefix_ids: tuple[int, ...] = ()  # a part of framed chunks' keys; a conversation's first segment may be another one
    note: str | None = None  # for the report: why a joined text was not searched for passages; None if it was
    unrecognised: int = 0  # tokens of texts as long as passages in which no warmed passage was found
    joined: bool = False  # whether a framework joined the text, so that it may contain unknown passages
    turn_starts: tuple[str, ...] = ()  # strings that end an answer, because the model begins a new turn of the wording
    # Returns whether a text ends behind the model's reasoning, which may repeat the prompt; None without reasoning.
    in_answer: Callable[[str], bool] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        segments = tuple(segment for segment in self.segments if segment.ids)
        object.__setattr__(self, "segments", segments)
        if not segments or segments[-1].role in (Role.CHUNK, Role.SYSTEM_PREFIX):
            raise ValueError("a prompt must end with text that is not stored, such as the question")
        if any(segment.role is Role.SYSTEM_PREFIX for segment in segments[1:]):
            raise ValueError("only the first segment of a prompt can be its system prefix")

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """Token ids of the whole prompt."""
        return tuple(token for segment in self.segments for token in segment.ids)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """All segments with their positions."""
        edges = accumulate((len(segment.ids) for segment in self.segments), initial=0)
        pairs = zip(pairwise(edges), self.segments, strict=True)
        return tuple(Span(start, stop, segment) for (start, stop), segment in pairs)

    @property
    def chunks(self) -> tuple[Span, ...]:
        """The segments of retrieved passages."""
        return tuple(span for span in self.spans if span.segment.role is Role.CHUNK)

    @cached_property
    def passages(self) -> tuple[str, ...]:
        """`Segment.ids_hash` of each passage, in order; parts of one count once."""
        return tuple(dict.fromkeys(span.segment.ids_hash for span in self.chunks))

    def __len__(self) -> int:
        return len(self.ids)
