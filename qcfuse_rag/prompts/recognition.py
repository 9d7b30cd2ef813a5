r"""Recognise warmed passages in text: in finished text that a framework has joined, and in a conversation's turns.

A text is read as *atoms*, words and single other characters, and the *gaps* between them: whitespace, as such or
escaped as `\n`. A passage is recognised by hashes of its atoms, so that a framework may strip, indent or quote it. Its
gaps are kept, so that the passage can be put together again as it was warmed. No text is kept: the store has hashes, as
hard to guess as a chunk's address, and the whitespace of each passage. A passage that loses its last source is no
longer recognised.

A prompt's ids are those of the text tokenised as a whole. A passage was tokenised alone when it was warmed; its tokens
equal those of the text everywhere but at its edges. Equal tokens use the stored cache; others are ordinary rows. So a
method that finds or reuses nothing computes exactly the prompt of the model's own pipeline.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import xxhash

from qcfuse_rag.errors import InvalidTemplate, StoreError
from qcfuse_rag.models.fingerprint import Fingerprint, digest
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.chat_template import RenderedText
from qcfuse_rag.prompts.segments import ChunkPart, Prompt, Role, Segment
from qcfuse_rag.prompts.template import Tool, Turn
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.key import ChunkKey

UNSOUGHT = "no passages were looked for"
"""The beginning of a fallback where a text was not searched for passages; the reason follows a colon."""

MIN_RUN = 16
"""Fewest equal tokens in a row that are worth a read from the store."""
ANCHOR = 12
"""Atoms in an anchor, whose hash suggests a passage; shorter passages are not found, and cost little to compute."""
PIECES = re.compile(r"((?:\\[nrt]|\s)+)|\w+|[^\w\s]")
SEPARATOR = "\0"

INSERT_SIGNATURE = """
INSERT OR REPLACE INTO located SELECT ?1, ?2, ?3, ?4, ?5 WHERE NOT EXISTS (
    SELECT 1 FROM located WHERE name = ?1 AND anchor = ?2 AND atoms = ?3 AND gaps IS ?4 AND passage = ?5
) AND (NOT ?6 OR EXISTS (SELECT 1 FROM chunks WHERE passage = ?5))
"""
"""Does not write a row that exists: every process would read all anchors again; nor one that was forgotten."""

HEX_DIGITS = 32
SELECT_ANCHORS = f"SELECT anchor FROM located WHERE substr(name, 1, length(name) - {HEX_DIGITS}) = ?"
"""Of one tenant, whose names have the same characters before the digits; it must not learn how many others have."""


@dataclass(frozen=True, slots=True)
class PassageMatch:
    """A passage in a text: it takes the characters `start <= c < stop`, and was warmed as `text`."""

    start: int
    stop: int
    text: str


FindPassages = Callable[[str], list[PassageMatch]]
"""Returns the warmed passages in a text, in order; raises `StoreError` if it cannot be searched."""


def prompt_from_text(
    builder: PromptBuilder,
    find: FindPassages,
    conversation: Sequence[Turn] | str,
    tools: Sequence[Tool] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Prompt:
    """See `FusionEngine.prompt_from_text`; if passages cannot be searched, the prompt's note says why."""
    finished = isinstance(conversation, str)
    if finished and chat_template_kwargs:
        raise InvalidTemplate("finished text has no chat template; give messages, or omit chat_template_kwargs")
    builder = builder.with_kwargs(chat_template_kwargs)
    rendered = RenderedText(conversation) if isinstance(conversation, str) else builder.render(conversation, tools)
    segments, note = text_segments(builder, find, rendered, begin=finished)
    return Prompt(tuple(segments), prefix_ids=builder.prefix_ids, joined=True, note=note)


def prompt_among_turns(
    builder: PromptBuilder,
    find: FindPassages,
    question: str,
    passages: Sequence[str],
    history: Sequence[Turn],
    tools: Sequence[Tool],
    later: Sequence[Turn],
) -> Prompt:
    """See `PromptBuilder.build`; warmed passages in other turns, of earlier questions and tools, are recognised."""
    if not history and not later:
        return builder.build(question, passages, tools=tools)
    notes: list[str | None] = []

    def split_text(rendered: RenderedText) -> list[Segment]:
        segments, note = text_segments(builder, find, rendered)
        notes.append(note)
        return segments

    prompt = builder.build(question, passages, history, tools, later, split_text)
    return replace(prompt, note=next(filter(None, notes), None), joined=True)


def text_segments(
    builder: PromptBuilder, find: FindPassages, rendered: RenderedText, *, begin: bool = False
) -> tuple[list[Segment], str | None]:
    """Return the segments of a text, of which the last is not stored, and why it was not searched for passages, if so.

    `begin` puts the tokenizer's start token in front.
    """
    text, note, matches = rendered.text, None, list[PassageMatch]()
    ids, offsets = builder.tokens.encode_whole(rendered, begin=begin)  # refuses a text that is too long to be searched
    if not ids:  # `Prompt` refuses a prompt of nothing else with the reason
        return [Segment(Role.TEXT, (), text)], None
    try:
        matches = find(text)
    except StoreError as error:
        note = f"{UNSOUGHT}: {error}"

    def segment(role: Role, start: int, stop: int, part: ChunkPart | None = None) -> Segment:
        return Segment(role, ids[start:stop], text[offsets[start][0] : offsets[stop - 1][1]], part)

    segments: list[Segment] = []
    end = 0
    for start, stop, part in _stored_parts(builder, text, ids, offsets, matches):
        stop = min(stop, len(ids) - 1)  # the last token must be computed to answer
        if end < start:
            segments.append(segment(Role.TEXT, end, start))
        segments.append(segment(Role.CHUNK, start, stop, part))
        end = stop
    return [*segments, segment(Role.TEXT, end, len(ids))], note


def _stored_parts(
    builder: PromptBuilder,
    text: str,
    ids: tuple[int, ...],
    offsets: Sequence[tuple[int, int]],
    matches: Sequence[PassageMatch],
) -> Iterator[tuple[int, int, ChunkPart]]:
    """Yield the token ranges `start <= t < stop` whose tokens equal those of a stored chunk, in order."""
    start, lead = 0, builder.template.chunk_lead
    for match in matches:
        while start < len(ids) and offsets[start][1] <= match.start:
            start += 1
        stop = start
        while stop < len(ids) and offsets[stop][0] < match.stop:
            stop += 1
        chunk_ids = builder.chunk_ids(match.text)
        in_text = _positioned(text[match.start : match.stop], ids[start:stop], offsets[start:stop], match.start)
        in_chunk = _positioned(match.text, chunk_ids, builder.chunk_offsets(match.text), lead)
        for chunk_start, text_start, size in _equal_runs(in_chunk, in_text):
            if size >= MIN_RUN:
                first = start + text_start
                yield first, first + size, ChunkPart(chunk_ids, chunk_start)
        start = stop


PositionedToken = tuple[int, int, int]
"""Start and end of a token in its text without whitespace, and its id."""


def _positioned(text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]], lead: int) -> list[PositionedToken]:
    """Return the positions of tokens in a text without its whitespace; offsets count from `lead` characters before."""
    before = [0] * (len(text) + 1)  # characters of atoms before each position
    for _, start, stop in _atoms(text):
        before[start + 1 : stop + 1] = [1] * (stop - start)
    before, last = list(accumulate(before)), len(text)
    inside = [(min(max(start - lead, 0), last), min(max(stop - lead, 0), last)) for start, stop in offsets]
    return [(before[start], before[stop], token) for (start, stop), token in zip(inside, ids, strict=True)]


def _equal_runs(left: list[PositionedToken], right: list[PositionedToken]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of equal tokens at equal positions: the start in both lists, and the length. Takes linear time."""
    i = j = size = 0
    while i < len(left) and j < len(right):
        if left[i] == right[j]:
            i, j, size = i + 1, j + 1, size + 1
            continue
        if size:
            yield i - size, j - size, size
            size = 0
        # Advance the list whose token starts earlier; if both start together, the list whose token ends earlier.
        if left[i][:2] <= right[j][:2]:
            i += 1
        else:
            j += 1
    if size:
        yield i - size, j - size, size


@dataclass(frozen=True, slots=True)
class PassageSignature:
    """What a passage is recognised by: 64-bit hash of its first atoms, their number, the digest of all atoms, and gaps.

    Gaps are the whitespace before, between and after the atoms, compressed.
    """

    anchor: int
    atoms: int
    name: str
    gaps: bytes


def passage_signature(text: str, seed: int) -> PassageSignature | None:
    """Return the signature of a passage, by the seed of its anchor's hash; None if it is too short."""
    atoms = list(_atoms(text))
    if len(atoms) < ANCHOR:
        return None
    edges = [0, *(edge for _, start, stop in atoms for edge in (start, stop)), len(text)]
    gaps = [text[edges[i] : edges[i + 1]] for i in range(0, len(edges), 2)]
    joined, starts = _joined(atoms)
    packed = zlib.compress(SEPARATOR.join(gaps).encode(), 9)
    return PassageSignature(_anchor_hash(joined[: starts[ANCHOR] - 1], seed), len(atoms), digest(joined), packed)


SignaturesByLength = dict[int, dict[str, PassageSignature]]
"""Signatures by number of atoms, rising, then by name; of equal ones the first."""


def find_passages(
    text: str, seed: int, known: Callable[[int], Iterable[PassageSignature]], name: Callable[[str], str] = str
) -> list[PassageMatch]:
    """Return the passages in a text, in order and without overlaps; of those with the same beginning the longest.

    `known` returns the signatures with an anchor. It is called for every atom of the text, but once for an anchor that
    has signatures. `name` turns a digest of atoms into the name that such signatures have.
    """
    atoms = list(_atoms(text))
    joined, starts = _joined(atoms)
    matches, position, by_anchor = list[PassageMatch](), 0, dict[int, SignaturesByLength]()
    while position + ANCHOR <= len(atoms):
        anchor = _anchor_hash(joined[starts[position] : starts[position + ANCHOR] - 1], seed)
        candidates = by_anchor.get(anchor)
        if candidates is None and (signatures := list(known(anchor))):
            candidates = by_anchor[anchor] = {}
            for signature in sorted(signatures, key=lambda signature: signature.atoms):
                candidates.setdefault(signature.atoms, {}).setdefault(signature.name, signature)
        found = _longest(joined, starts, position, candidates, name) if candidates else None
        if found is None:
            position += 1
            continue
        end = position + found.atoms
        # The atoms of this text, with the whitespace that the passage had when it was warmed.
        with suppress(zlib.error, ValueError):
            gaps = zlib.decompress(found.gaps).decode().split(SEPARATOR)
            warmed = gaps[0] + "".join(atom[0] + gap for atom, gap in zip(atoms[position:end], gaps[1:], strict=True))
            matches.append(PassageMatch(atoms[position][1], atoms[end - 1][2], warmed))
        position = end
    return matches


def _longest(
    joined: bytes, starts: list[int], position: int, candidates: SignaturesByLength, name: Callable[[str], str]
) -> PassageSignature | None:
    """Return the longest passage that begins at an atom; the text is hashed once, however many candidates there are."""
    state, hashed, digests = hashlib.blake2b(digest_size=16), starts[position], list[tuple[str, int]]()
    for atoms in candidates:
        if position + atoms >= len(starts):
            break
        state.update(joined[hashed : starts[position + atoms] - 1])
        hashed = starts[position + atoms] - 1
        digests.append((state.hexdigest(), atoms))  # equals `digest` of all atoms so far
    found = (candidates[atoms].get(name(atoms_digest)) for atoms_digest, atoms in reversed(digests))
    return next((signature for signature in found if signature is not None), None)


def _atoms(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield text, start and end of each atom."""
    return ((piece[0], piece.start(), piece.end()) for piece in PIECES.finditer(text) if piece[1] is None)


def _joined(atoms: list[tuple[str, int, int]]) -> tuple[bytes, list[int]]:
    """Return the atoms as the bytes to be hashed, and where each begins there; last, where another one would."""
    words = [word.encode("utf-8", "surrogatepass") for word, _, _ in atoms]
    return SEPARATOR.encode().join(words), list(accumulate((len(word) + 1 for word in words), initial=0))


def _anchor_hash(joined: bytes, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(joined, seed) - (1 << 63)  # signed, as SQLite stores integers


class PassageSignatures:
    """The signatures of a model's passages in the store's manifest.

    Every method raises `StoreError` if the manifest cannot be read or written. `sources` returns the store's sources;
    it is called each time, since a fork opens them anew.
    """

    def __init__(self, sources: Callable[[], Sources], fingerprint: Fingerprint) -> None:
        self._sources, self._fingerprint = sources, fingerprint
        self._anchors: tuple[object, frozenset[int]] = (None, frozenset())

    def add(self, passages: Iterable[tuple[str, ChunkKey, bool]]) -> None:
        """Recognise passages from now on: texts as in prompts, a key of each, and whether it needs a source."""
        rows = [
            (
                self._name(signature.name),
                signature.anchor,
                signature.atoms,
                signature.gaps,
                self._sources().passage_id(key),
                has_source,
            )
            for text, key, has_source in passages
            if (signature := passage_signature(text, self._seed)) is not None
        ]
        with self._sources().manifest.writing() as database:
            database.executemany(INSERT_SIGNATURE, rows)

    def count(self) -> int:
        """Return how many passages can be recognised; those with the same beginning count once."""
        return len(self._known_anchors())

    def find(self, text: str) -> list[PassageMatch]:
        """Return the passages in a text, in order."""
        anchors = self._known_anchors()

        def known(anchor: int) -> list[PassageSignature]:
            if anchor not in anchors:
                return []
            rows = self._sources().manifest.read("SELECT name, atoms, gaps FROM located WHERE anchor = ?", anchor)
            # Whoever writes to the folder may have put other values into the manifest.
            return [
                PassageSignature(anchor, atoms, name, gaps)
                for name, atoms, gaps in rows
                if (type(name), type(atoms), type(gaps)) == (str, int, bytes)
            ]

        return find_passages(text, self._seed, known, self._name) if anchors else []

    @cached_property
    def _seed(self) -> int:
        # It differs between stores and tenants.
        return int(self._name("")[-16:], 16)

    def _known_anchors(self) -> frozenset[int]:
        manifest, (seen, anchors) = self._sources().manifest, self._anchors
        version = manifest, manifest.version()
        if version != seen:
            rows = manifest.read(SELECT_ANCHORS, self._name("")[:-HEX_DIGITS])
            anchors = frozenset(anchor for (anchor,) in rows)
            self._anchors = (version, anchors)
        return anchors

    def _name(self, digest: str) -> str:
        return self._sources().passage_id(ChunkKey(self._fingerprint, "located", "", digest))
