"""Recognise warmed passages in text: in finished text that a framework has joined, and in a conversation's turns.

Whole passages are found, cuts of them, and what is left beside a changed word. A passage is kept as blocks of a few
atoms. A block's *anchor*, a hash of its first atoms, suggests a place in a text, wherever the block stands there (as in
rsync, Tridgell and Mackerras 1996). A hash of the block's token ids then decides: where the text has the same ids, it
takes the stored keys and values. Where the ids differ, because a client rewrote quotes or white space, the block is
written as it was warmed and tokenised; if that gives the stored hash, equal tokens at equal places are reused.

A prompt's ids are those of the text tokenised as a whole, and no part is reused whose ids differ from the stored ones.
So recognition changes what is computed, never the ids: a method that reuses nothing computes exactly the prompt of the
model's own pipeline.

No text is kept: a store has hashes of some words each, the white space, and the characters that folding changes. The
hashes are seeded by the model, the tenant and the secret that encrypts the store.
"""

from __future__ import annotations

import hashlib
import json
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qcfuse_rag.errors import InvalidTemplate, StoreError
from qcfuse_rag.models.fingerprint import Fingerprint
from qcfuse_rag.prompts.atoms import Atoms, Undo, written_again
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.chat_template import RenderedText
from qcfuse_rag.prompts.passage_blocks import (
    BLOCK,
    Alignment,
    Integers,
    Offsets,
    PassageBlocks,
    Run,
    TokenisedText,
    anchors_and_sizes,
    blocks_of,
)
from qcfuse_rag.prompts.segments import ChunkPart, Prompt, Role, Segment
from qcfuse_rag.prompts.template import Tool, Turn
from qcfuse_rag.store.documents.sources import Manifest, PassageRow, PassageRows, Sources
from qcfuse_rag.store.key import ChunkKey

MIN_TOKENS = 16
"""Fewest tokens of a passage in a text that are worth a read from the store."""
MOST_ALIKE, MOST_PLACES = 64, 8
"""Most blocks with one anchor that are tried at a place, as what all pages of a site begin with; and in the mean."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Tokens `start <= t < stop` of a text that equal those of a stored chunk from `part.start` on."""

    start: int
    stop: int
    part: ChunkPart


@dataclass(frozen=True, eq=False)
class AnchorTable:
    """The anchors of many passages, in order.

    Attributes:
        anchors: `[A]`, rising.
        passages: `[A]`, the passage of each.
        atoms: `[A]`, the atom of the passage at which each begins.
        numbers: `[passages]`, their rows in the manifest.
    """

    anchors: NDArray[np.uint32]
    passages: NDArray[np.uint32]
    atoms: NDArray[np.uint32]
    numbers: Integers

    @classmethod
    def empty(cls) -> AnchorTable:
        """Return a table without passages."""
        none = np.empty(0, dtype=np.uint32)
        return cls(none, none, none, np.empty(0, dtype=np.int64))

    def extended(self, rows: Sequence[tuple[int, bytes]]) -> AnchorTable:
        """Return a table with the blocks of further rows."""
        read = [anchors_and_sizes(data) for _, data in rows]
        counts = [len(anchors) for anchors, _ in read]
        anchors = np.concatenate([anchors for anchors, _ in read])
        passages = np.repeat(np.arange(len(rows)), counts) + len(self.numbers)
        ends = np.cumsum(np.concatenate([sizes for _, sizes in read]), dtype=np.int64)
        before = np.append(0, ends)  # atoms before each block, counted through all passages
        atoms = before[:-1] - np.repeat(before[np.cumsum([0, *counts[:-1]])], counts)
        order = np.argsort(anchors, kind="stable")
        order = order[np.searchsorted(anchors[order], 1) :]  # without blocks that have no anchor
        places = np.searchsorted(self.anchors, anchors[order])  # new ones first: old ones may be forgotten by now
        return AnchorTable(
            np.insert(self.anchors, places, anchors[order]),
            np.insert(self.passages, places, passages[order].astype(np.uint32)),
            np.insert(self.atoms, places, atoms[order].astype(np.uint32)),
            np.append(self.numbers, [number for number, _ in rows]),
        )

    def places(self, anchors: NDArray[np.uint32]) -> Iterator[tuple[int, int, Integers]]:
        """Yield the passages that may stand in a text with these anchors, the likeliest first.

        Each with its row's number, the atom of the text at which it would begin, and the atoms at which its blocks do.
        """
        if not len(self.anchors):
            return
        order = np.argsort(anchors, kind="stable")  # the table is searched faster in its order
        first = np.searchsorted(self.anchors, anchors[order])
        known = self.anchors.take(first, mode="clip") == anchors[order]
        order, first = order[known], first[known]
        counts = np.minimum(np.searchsorted(self.anchors, anchors[order], side="right") - first, MOST_ALIKE)
        rarest = np.argsort(counts, kind="stable")  # of a text that repeats itself some places are enough
        rarest = rarest[np.cumsum(counts[rarest]) <= MOST_PLACES * len(anchors)]
        order, first, counts = order[rarest], first[rarest], counts[rarest]
        places = np.repeat(order, counts)
        within = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
        entries = np.repeat(first, counts) + within
        passages, begins = self.passages[entries], places - self.atoms[entries].astype(np.int64)
        groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for passage, begin, place in zip(passages.tolist(), begins.tolist(), places.tolist(), strict=True):
            groups[passage, begin].append(place)
        for (passage, begin), found in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0][1])):
            yield int(self.numbers[passage]), begin, np.array(found)


class RecognitionIndex:
    """The passages of a model in a store's manifest that can be found in a text.

    Every method raises `StoreError` if the manifest cannot be read or written. Safe to use from several threads.

    Args:
        sources: returns the store's sources; it is called each time, since a fork opens them anew.
        fingerprint: of the model.
        prompts: how passages are written and tokenised.
        secret: encrypts the store; empty without one.
    """

    def __init__(
        self, sources: Callable[[], Sources], fingerprint: Fingerprint, prompts: PromptBuilder, secret: bytes
    ) -> None:
        self._sources, self._fingerprint, self._prompts = sources, fingerprint, prompts
        self._key = hashlib.blake2b(secret).digest()
        self._lock = threading.Lock()
        self._manifest: Manifest | None = None
        self._version: object = None
        self._table, self._read = AnchorTable.empty(), 0

    def add(self, passages: Iterable[tuple[str, ChunkKey, bool]]) -> None:
        """Recognise passages from now on: texts as in prompts, a key of each, and whether it needs a source."""
        table, rows = PassageRows(self._sources().manifest), list[PassageRow]()
        first, behind = (len(Atoms.of(written)) for written in self._around)
        for text, key, needs_source in passages:
            if (name := self._sources().passage_id(key)) in table:
                continue
            chunk = self._tokenised(self._prompts.template.format_chunk(text))
            last = len(chunk.atoms) - behind
            if (blocks := blocks_of(chunk, first, last, self._seed)) is not None:
                undo = [(atom - first, *how) for atom, *how in chunk.atoms.undo() if first <= atom < last]
                written = zlib.compress(json.dumps(["\0".join(chunk.atoms.gaps()[first:last]), undo]).encode(), 9)
                ids = self._masked(name, bytes.fromhex(key.ids))
                rows.append(PassageRow(name, self._owner, ids, blocks.to_bytes(), written, needs_source))
        if rows:
            table.add(rows)

    def count(self) -> int:
        """Return how many passages can be recognised."""
        return PassageRows(self._sources().manifest).count(self._owner)

    def find(self, text: str, ids: Sequence[int], offsets: Offsets) -> list[StoredRun] | None:
        """Return the parts of passages in a text with these tokens, in order; no token is in two of them.

        None if there are no passages.
        """
        table, rows = self._current_table(), PassageRows(self._sources().manifest)
        if not len(table.numbers):
            return None
        whole = TokenisedText.of(text, ids, offsets)
        taken, found = np.zeros(len(whole.atoms), dtype=bool), defaultdict[tuple[str, int], list[Run]](list)
        left = MOST_ALIKE + len(whole.atoms) // BLOCK
        for number, begin, places in table.places(whole.anchors(self._seed)):
            if taken[places].all() or (row := rows.row(number)) is None:
                continue
            if (left := left - 1) < 0:
                break
            if (blocks := PassageBlocks.from_bytes(row.blocks)) is not None:
                alignment = Alignment(whole, blocks, begin, places, self._seed)
                unpack = cache(partial(_unpacked, row.gaps))
                runs = alignment.runs(taken, partial(self._rewritten, unpack, int(blocks.ends[-1])))
                found[self._masked(row.passage, row.ids).hex(), blocks.n_tokens] += runs
        return sorted(
            (
                StoredRun(start, start + size, ChunkPart(ids_hash, n_tokens, stored))
                for (ids_hash, n_tokens), runs in found.items()
                if sum(size for _, _, size in runs) >= MIN_TOKENS
                for start, stored, size in _joined(runs)
            ),
            key=attrgetter("start"),
        )

    def _rewritten(
        self, unpack: Callable[[], tuple[list[str], list[Undo]]], atoms: int, first: int, words: Sequence[str]
    ) -> tuple[TokenisedText, int] | None:
        """Write atoms of a passage of so many as they were; see `alignment.Rewrite`."""
        (lead, tail), last = self._around, first + len(words)
        try:
            gaps, undo = unpack()
            text = written_again(words, gaps[first:last], undo, first)
            chunk = self._tokenised((lead if first == 0 else "") + text + (tail if last == atoms else ""))
        except (zlib.error, ValueError, TypeError, AttributeError, RecursionError):  # others may write to the folder
            return None
        before = len(Atoms.of(lead)) if first == 0 else 0
        return (chunk, before) if chunk.atoms.words[before : before + len(words)] == words else None

    def _tokenised(self, text: str) -> TokenisedText:
        ids, offsets = self._prompts.tokens.encode(text)
        return TokenisedText.of(text, ids, offsets)

    @cached_property
    def _around(self) -> tuple[str, str]:
        """The wording's text before and behind a passage, without the white space before the passage."""
        lead, _, tail = self._prompts.template.chunk.partition("{text}")
        return lead.format().rstrip(), tail.format()

    @cached_property
    def _name(self) -> bytes:
        """It differs between models, stores with a secret, and tenants."""
        name = self._sources().passage_id(ChunkKey(self._fingerprint, "recognised", "", ""))
        return hashlib.blake2b(name.encode(), key=self._key).digest()

    @cached_property
    def _seed(self) -> int:
        return int.from_bytes(self._name[:8])

    @cached_property
    def _owner(self) -> int:
        return int.from_bytes(self._name[8:16], signed=True)  # as SQLite stores integers

    def _masked(self, passage: str, ids: bytes) -> bytes:
        """Hide or show the hash of a chunk's ids, which must be as hard to guess as its address."""
        mask = hashlib.blake2b(passage.encode(), key=self._name, digest_size=16).digest()
        return bytes(a ^ b for a, b in zip(mask, ids, strict=True))

    def _current_table(self) -> AnchorTable:
        manifest = self._sources().manifest
        with self._lock:
            if manifest is not self._manifest:
                self._manifest, self._version, self._table = manifest, None, AnchorTable.empty()
            if (version := manifest.version()) != self._version:
                if len(self._table.numbers) > 2 * self._read + MOST_ALIKE:  # some may be forgotten by now
                    self._table, self._read = AnchorTable.empty(), 0
                last = int(self._table.numbers[-1]) if len(self._table.numbers) else 0
                if rows := PassageRows(manifest).blocks_since(self._owner, last):
                    self._table = self._table.extended(rows)
                    self._read = self._read or len(rows)
                self._version = version
            return self._table


def _unpacked(written: bytes) -> tuple[list[str], list[Undo]]:
    gaps, undo = json.loads(zlib.decompress(written))
    return gaps.split("\0"), undo


def _joined(runs: list[Run]) -> Iterator[Run]:
    """Yield runs in order; those that continue each other in both texts as one."""
    joined: Run | None = None
    for start, stored, size in sorted(runs):
        if joined is not None and (joined[0] + joined[2], joined[1] + joined[2]) == (start, stored):
            joined = (joined[0], joined[1], joined[2] + size)
            continue
        if joined is not None:
            yield joined
        joined = (start, stored, size)
    if joined is not None:
        yield joined


UNSOUGHT = "no passages were looked for"
"""The beginning of a fallback where a text was not searched for passages; the reason follows a colon."""

LONG_TEXT = 800
"""Fewest characters of a text that may have passages: frameworks' instructions have some 500."""

FindPassages = Callable[[str, Sequence[int], Offsets], list[StoredRun] | None]
"""Returns the parts of warmed passages in a text, see `RecognitionIndex.find`; may raise `StoreError`."""


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
    segments, note, unrecognised = text_segments(builder, find, rendered, begin=finished)
    return Prompt(tuple(segments), prefix_ids=builder.prefix_ids, joined=True, note=note, unrecognised=unrecognised)


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
    notes, counts = list[str | None](), list[int]()

    def split_text(rendered: RenderedText) -> list[Segment]:
        segments, note, unrecognised = text_segments(builder, find, rendered)
        notes.append(note)
        counts.append(unrecognised)
        return segments

    prompt = builder.build(question, passages, history, tools, later, split_text)
    return replace(prompt, note=next(filter(None, notes), None), joined=True, unrecognised=sum(counts))


def text_segments(
    builder: PromptBuilder, find: FindPassages, rendered: RenderedText, *, begin: bool = False
) -> tuple[list[Segment], str | None, int]:
    """Return the segments of a text, of which the last is not stored, and how it was searched for passages.

    That is why it could not be searched, or None, and the tokens of long texts in which none was found. `begin` puts
    the tokenizer's start token in front.
    """
    text, note, runs = rendered.text, None, None
    ids, offsets = builder.tokens.encode_whole(rendered, begin=begin)  # refuses a text that is too long to be searched
    if not ids:  # `Prompt` refuses a prompt of nothing else with the reason
        return [Segment(Role.TEXT, (), text)], None, 0
    try:
        runs = find(text, ids, offsets)
    except StoreError as error:
        note = f"{UNSOUGHT}: {error}"

    def segment(role: Role, start: int, stop: int, part: ChunkPart | None = None) -> Segment:
        return Segment(role, ids[start:stop], text[offsets[start][0] : offsets[stop - 1][1]], part)

    segments: list[Segment] = []
    end = 0
    for run in runs or ():
        stop = min(run.stop, len(ids) - 1)  # the last token must be computed to answer
        if end < run.start:
            segments.append(segment(Role.TEXT, end, run.start))
        if run.start < stop:
            segments.append(segment(Role.CHUNK, run.start, stop, run.part))
        end = stop
    segments.append(segment(Role.TEXT, end, len(ids)))
    special = frozenset(builder.tokenizer.all_special_ids)
    return segments, note, 0 if runs is None else _long_text(segments, offsets, special)


def _long_text(segments: Sequence[Segment], offsets: Offsets, special: frozenset[int]) -> int:
    """Return the tokens of texts without passages that are as long as passages; special tokens end a message."""
    tokens = end = 0
    for segment in segments:
        first, end = end, end + len(segment.ids)
        ends = [end - len(segment.ids) + i for i, token in enumerate(segment.ids) if token in special]
        for stop in (*ends, end) if segment.role is Role.TEXT else ():
            if first < stop and offsets[stop - 1][1] - offsets[first][0] >= LONG_TEXT:
                tokens += stop - first
            first = stop + 1
    return tokens
