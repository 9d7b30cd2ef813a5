"""Read documents to warm, as passages: text files, JSON lines, folders of them, or another library's index."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.library.conversion import CONVERTED, Converter, conversion_of
from qcfuse_rag.library.files import Unread, add_unread, find_files, real_path, unreadable
from qcfuse_rag.library.plain_text import UnreadableFile, decode_text, is_unicode_text
from qcfuse_rag.store.backends.files import file_size

MARKDOWN_ENDINGS = {".md", ".markdown"}
JSON_LINES = {".jsonl", ".ndjson"}
MOST_TEXT_BYTES = 16 << 20
"""Largest text file that is read from a folder, about 4 million tokens; one that is named is read whatever its size."""

NO_TEXT = "without text"
READERS_GROUP = "qcfuse_rag.readers"
FILES = "files"

PassagesBySource = dict[str, list[str]]
"""Passages by source, in order."""

LONG_RUN = re.compile(r"(?<![^\s\u3002\uff01\uff1f])[^\s\u3002\uff01\uff1f]{1024,}")
"""Matches text without a place to split, such as base64. The splitter's time grows with the square of its length."""

LONG_LINE = re.compile(r"(?<![^\n])[^\n]{8192,}")
"""Matches lines that are split into parts of at most `PART` characters first, for the same reason."""

DEEP_MARKDOWN = re.compile(
    r"(?m)^(?:(?:[ \t]*+(?:>|[*+-][ \t]|\d{1,9}[.)][ \t])){8}|(?: {32}|\t{8})[ \t]*+(?:[>*+-]|\d{1,9}[.)]))"
)
"""Matches lists and quotes of more than some eight levels, which the Markdown splitter takes long for."""

PART = 8192
LONG_PART = 1 << 18
"""Most characters of lines that a splitter gets at once, because nothing interrupts it."""

LAST_SENTENCE_END = re.compile(r".*(?:[.!?]\s|[\u3002\uff01\uff1f])")
LAST_SPACE = re.compile(r".*\s")


def read_passages(
    paths: Iterable[Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    reader: str = FILES,
    max_tokens: int,
    skip: Sequence[Path] = (),
    progress: Callable[[int, int], None] = lambda *_: None,
    unread: Unread | None = None,
) -> PassagesBySource:
    """Read passages from files or from an index.

    Args:
        paths: text files, files of JSON lines, and folders of them; or the input of another reader.
        tokenizer: measures passages.
        reader: `files`, or the name of an entry point in the group `qcfuse_rag.readers`: a function that takes a path
            and yields `(source, passage)`. The integrations provide `llama-index` and `langchain`.
        max_tokens: most tokens of a passage; passages of other readers are not split.
        skip: folders whose files are read only if they are named; see `find_files`.
        progress: called with KB `(done, total)` of files, also while a long text is split.
        unread: receives what is not read in folders, and what has no text; None raises the first file that cannot be
            read.

    Raises:
        QCFuseError: if a path cannot be read.
    """
    named = list(paths)
    passages: PassagesBySource = {}
    if reader != FILES:
        read = load_reader(reader)
        for path in named:
            for source, text in read(path):
                passages.setdefault(source, []).append(text)
        return passages
    files = find_files(named, skip, unread)
    sizes = [(file_size(file) or 0) // 1000 for file in files]
    total, done, size = sum(sizes), 0, 0

    def advance(characters: int) -> None:
        progress(done + min(characters // 1000, size), total)

    splitting = TextSplitting(tokenizer, max_tokens)
    splitting.advance = advance
    read_files: list[PassagesBySource | str] = []
    with Converter() as convert:
        for file, size in zip(files, sizes, strict=True):
            read_files.append(try_file(file, splitting, convert, named=file in named))
            done += size
            advance(0)
    return collect_passages(zip(files, read_files, strict=True), named, unread)


def try_file(path: Path, splitting: TextSplitting, convert: Converter, *, named: bool) -> PassagesBySource | str:
    """Return the passages of a file by their source, or the reason why it is not read."""
    try:
        return _read_file(path, splitting, convert, None if named else MOST_TEXT_BYTES)
    except UnreadableFile as error:
        return str(error)


def collect_passages(
    results: Iterable[tuple[Path, PassagesBySource | str]], named: Sequence[Path], unread: Unread | None
) -> PassagesBySource:
    """Return the passages of all files; see `read_passages` for `unread`, and `try_file` for what was read of each."""
    passages: PassagesBySource = {}
    for path, result in results:
        if not isinstance(result, str):
            for source, texts in result.items():
                passages.setdefault(source, []).extend(texts)
        elif unread is None or path in named:
            raise QCFuseError(f"cannot read {path}: {result}")
        else:
            add_unread(unread, named, result, path)
    return passages


def check_paths(paths: Iterable[Path], reader: str, skip: Sequence[Path], *, if_empty: str | None) -> None:
    """Check the paths and the reader of a job before a model is loaded; see `read_passages`.

    Each folder is checked by itself: an empty folder may be a missing mount, and warming would forget its documents.
    The error about it ends with `if_empty`; None accepts it.
    """
    if reader != FILES:
        load_reader(reader)
        return
    _import_splitters()
    for path in paths:
        if not find_files([path], skip) and if_empty is not None:
            raise QCFuseError(f"there are no files to read in {path}{if_empty}")
        if path.is_file():
            try:
                with _system_errors():
                    _read_text(path, None)
            except UnreadableFile as error:
                raise QCFuseError(f"cannot read {path}: {error}") from error


def load_reader(name: str) -> Callable[[Path], Iterable[tuple[str, str]]]:
    """Return the reader of an installed package; raise `QCFuseError` if none has this reader."""
    readers = entry_points(group=READERS_GROUP)
    if name not in readers.names:
        names = ", ".join(sorted({FILES, *readers.names}))
        raise QCFuseError(
            f"there is no reader {name!r}; there are {names}. `llama-index` comes with llama-index-llms-qcfuse, "
            "`langchain` with langchain-qcfuse"
        )
    read: Callable[[Path], Iterable[tuple[str, str]]] = readers[name].load()
    return read


def is_markdown(name: str) -> bool:
    """Return whether a document is Markdown or is read as such, by its name."""
    return Path(name).suffix.lower() in MARKDOWN_ENDINGS | CONVERTED


class TextSplitting:
    """Split text at its own structure into passages of at most `max_tokens`, in time proportional to its length."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        plain, markdown = _import_splitters()
        self._plain = plain.from_huggingface_tokenizer(tokenizer.backend_tokenizer, max_tokens)
        self._markdown = markdown.from_huggingface_tokenizer(tokenizer.backend_tokenizer, max_tokens)
        self._max_tokens = max_tokens
        self.advance: Callable[[int], None] = lambda _: None  # gets the characters that are split

    def split(self, text: str, *, markdown: bool) -> list[str]:
        """Return the passages of a text; page breaks of extracted PDF count as blank lines.

        A run of 1,024 characters without a space or an end of a sentence is cut by its length in bytes, because no
        token is shorter than a byte.
        """
        passages, done = list[str](), 0
        for part in _split_long_texts(text):
            passages += self._split(part, markdown=markdown)
            done += len(part)
            self.advance(done)
        return passages

    def _split(self, text: str, *, markdown: bool) -> list[str]:
        markdown = markdown and DEEP_MARKDOWN.search(text) is None
        splitter = self._markdown if markdown else self._plain
        text = text.replace("\f", "\n\n")
        parts = _split_long_blocks if markdown else _split_long_lines
        passages: list[str] = []
        end = 0
        for run in LONG_RUN.finditer(text):
            for part in parts(text[end : run.start()]):
                passages += splitter.chunks(part)
            for piece in _cut_by_bytes(run[0], self._max_tokens):
                passages += self._plain.chunks(piece)
            end = run.end()
        for part in parts(text[end:]):
            passages += splitter.chunks(part)
        return passages


def _import_splitters() -> tuple[Any, Any]:
    try:
        from semantic_text_splitter import MarkdownSplitter, TextSplitter
    except ImportError as error:
        raise QCFuseError(f"{error.name} is missing; run `pip install 'qcfuse-rag[cli]'`") from error
    return TextSplitter, MarkdownSplitter


def _read_file(path: Path, splitting: TextSplitting, convert: Converter, most_bytes: int | None) -> PassagesBySource:
    """Return the passages of a file by their source; of text with more than `most_bytes`, the file is not read."""
    name = str(real_path(path))
    if not is_unicode_text(name):
        raise UnreadableFile("named in bytes that are not UTF-8; rename them")
    with _system_errors():
        kind, text = _read_text(path, most_bytes)
        if kind is not None:
            return {name: splitting.split(convert.markdown(path, kind), markdown=True)}
    if path.suffix.lower() in JSON_LINES:
        return _read_lines(text, name, splitting)
    return {name: splitting.split(text, markdown=is_markdown(name))}


def _read_text(path: Path, most_bytes: int | None) -> tuple[str | None, str]:
    """Return the format that a file has to be converted from, or None and its text."""
    if (kind := conversion_of(path)) is not None:
        return kind, ""
    lines = path.suffix.lower() in JSON_LINES
    if most_bytes is not None and not lines and path.stat().st_size > most_bytes:
        raise UnreadableFile(f"larger than {most_bytes >> 20} MB; name the file to read it")
    return None, decode_text(path.read_bytes())


@contextmanager
def _system_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnreadableFile(unreadable(error)) from error


def _read_lines(text: str, name: str, splitting: TextSplitting) -> PassagesBySource:
    """Read one passage from each line: `{"text": ..., "source": ...}`; the default source is the file."""
    passages: PassagesBySource = {}
    # Only a line feed ends a line: `splitlines` also cuts at characters inside JSON strings.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            passage, source = data["text"], data.get("source", name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UnreadableFile(f"line {number}: not a JSON object with a `text` ({error})") from error
        if not isinstance(passage, str) or not isinstance(source, str):
            raise UnreadableFile(f"line {number}: `text` and `source` must be strings")
        if not is_unicode_text(passage + source):
            raise UnreadableFile(f"line {number}: a \\u escape is NUL or a lone surrogate, which is not text")
        passages.setdefault(source, []).extend(splitting.split(passage, markdown=False))
    return passages


def _split_long_texts(text: str) -> Iterator[str]:
    """Yield a text in parts: long ones end before the last heading that fits, or at a blank line or the end of one."""
    start = 0
    while len(text) - start > LONG_PART:
        ends = (text.rfind(end, start + 1, start + LONG_PART) + 1 for end in ("\n\n#", "\n\n", "\n"))
        stop = next(filter(None, ends), 0) or text.find("\n", start) + 1 or len(text)
        yield text[start:stop]
        start = stop
    yield text[start:]


def _split_long_lines(text: str) -> Iterator[str]:
    """Yield a text in parts: long lines end a part at the last sentence or space that fits."""
    start = 0
    for line in LONG_LINE.finditer(text):
        position = line.start()
        while line.end() - position > PART:
            part = (text, position, position + PART)
            last = LAST_SENTENCE_END.match(*part) or LAST_SPACE.match(*part)
            position = last.end() if last is not None else position + PART
            yield text[start:position]
            start = position
    yield text[start:]


def _split_long_blocks(text: str) -> Iterator[str]:
    """Yield a text in parts as `_split_long_lines`; blocks without a blank line end a part every `PART` characters."""
    for part in _split_long_lines(text):
        start = begun = position = 0
        for line in part.splitlines(keepends=True):
            if not line.strip():
                begun = position + len(line)
            elif position + len(line) - begun > PART and position > start:
                yield part[start:position]
                start = begun = position
            position += len(line)
        yield part[start:]


def _cut_by_bytes(text: str, max_bytes: int) -> Iterator[str]:
    """Yield a text in pieces of at most `max_bytes` bytes, or of one character."""
    data, start = text.encode(), 0
    while start < len(data):
        stop = start + max(max_bytes, 4)
        while stop < len(data) and data[stop] & 0xC0 == 0x80:  # in the middle of a character
            stop -= 1
        yield data[start:stop].decode()
        start = stop
