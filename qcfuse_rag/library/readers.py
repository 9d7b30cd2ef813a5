"""Read documents to warm, as passages: text files, JSON lines, folders of them, or another library's index."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from qcfuse_rag.errors import QCFuseError

MARKDOWN_ENDINGS = {".md", ".markdown"}
JSON_LINES = {".jsonl", ".ndjson"}
KNOWN_ENDINGS = {".txt", ".text", ".rst"} | MARKDOWN_ENDINGS | JSON_LINES
READERS_GROUP = "qcfuse_rag.readers"
FILES = "files"

PassagesBySource = dict[str, list[str]]
"""Passages by source, in order."""

LONG_RUN = re.compile(r"(?<![^\s\u3002\uff01\uff1f])[^\s\u3002\uff01\uff1f]{1024,}")
"""Matches text without a place to split, such as base64. The splitter's time grows with the square of its length."""

LONG_LINE = re.compile(r"(?<![^\n])[^\n]{8192,}")
"""Matches lines that are split into parts of at most `PART` characters first, for the same reason."""

PART = 8192
LAST_SENTENCE_END = re.compile(r".*(?:[.!?]\s|[\u3002\uff01\uff1f])")
LAST_SPACE = re.compile(r".*\s")


def read_passages(
    paths: Iterable[Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    reader: str = FILES,
    max_tokens: int,
    skip: Sequence[Path] = (),
    progress: Callable[[int, int], None] | None = None,
    unread: list[str] | None = None,
) -> PassagesBySource:
    """Read passages from files or from an index.

    Args:
        paths: text files (also text extracted from PDF), files of JSON lines, and folders of them; or the input of
            another reader.
        tokenizer: measures passages.
        reader: `files`, or the name of an entry point in the group `qcfuse_rag.readers`: a function that takes a path
            and yields `(source, passage)`. The integrations provide `llama-index` and `langchain`.
        max_tokens: most tokens of a passage; passages of other readers are not split.
        skip: folders whose files are read only if they are named; see `find_files`.
        progress: called with files `(done, total)`.
        unread: receives the reason for each file of a folder that cannot be read; None raises the first one.

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
    splitting = TextSplitting(tokenizer, max_tokens)
    files = list(find_files(named, skip))
    for done, file in enumerate(files, start=1):
        try:
            for source, texts in _read_file(file, splitting).items():
                passages.setdefault(source, []).extend(texts)
        except QCFuseError as error:
            if unread is None or file in named:
                raise
            unread.append(str(error))
        if progress is not None:
            progress(done, len(files))
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
        if not any(True for _ in find_files([path], skip)) and if_empty is not None:
            raise QCFuseError(f"there are no text files in {path}{if_empty}")


def find_files(paths: Iterable[Path], skip: Sequence[Path] = ()) -> Iterator[Path]:
    """Yield the readable files among paths and in folders, in order and each once.

    Links in a folder are followed to files in the given folders only, since a link can point anywhere. Files of a
    folder that are in one of the folders `skip` are left out, such as the passages of a library among its documents.

    Raises:
        QCFuseError: if a path does not exist, or is a file of another type.
    """
    named = list(paths)
    seen, resolved, skipped = set[Path](), [path.resolve() for path in named], [path.resolve() for path in skip]
    for path in named:
        if path.is_dir():
            readable = (p for p in path.rglob("*") if p.suffix.lower() in KNOWN_ENDINGS and p.is_file())
            files = sorted(p for p in readable if _is_inside(p, resolved, skipped))
        elif not path.exists():
            raise QCFuseError(f"there is no file or folder at {path}")
        elif path.suffix.lower() not in KNOWN_ENDINGS:
            raise QCFuseError(f"{path} is not a text file ({', '.join(sorted(KNOWN_ENDINGS))}); convert it first")
        else:
            files = [path]
        for file in files:
            if file.resolve() not in seen:  # the same file by another name or link
                seen.add(file.resolve())
                yield file


def skipped_files(paths: Iterable[Path], skip: Sequence[Path] = ()) -> Iterator[str]:
    """Yield messages on what `find_files` skips in folders, other than hidden files."""
    named = list(paths)
    resolved, skipped = [path.resolve() for path in named], [path.resolve() for path in skip]
    for folder in filter(Path.is_dir, named):
        endings = Counter[str]()
        for path in sorted(folder.rglob("*")):
            if skipped and _is_inside(path, skipped):
                continue
            ending = path.suffix.lower()
            outside_file = ending in KNOWN_ENDINGS and path.is_file() and not _is_inside(path, resolved)
            if outside_file:
                yield _printable(f"{path} links to a file elsewhere, which is not read; name that file as well")
            if outside_file or any(part.startswith(".") for part in path.relative_to(folder).parts):
                continue
            if path.is_symlink() and path.is_dir():
                if not _is_inside(path, resolved):
                    yield _printable(f"{path} links to a folder, which is not followed; name that folder as well")
            elif path.is_file() and ending not in KNOWN_ENDINGS:
                endings[ending or "without ending"] += 1
        if endings:
            kinds = ", ".join(f"{count} {ending}" for ending, count in endings.most_common())
            yield _printable(f"{folder} has files that are not text ({kinds}); convert them first")


def load_reader(name: str) -> Callable[[Path], Iterable[tuple[str, str]]]:
    """Return the reader of an installed package.

    Raises:
        QCFuseError: if no installed package has this reader.
    """
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
    """Return whether a document is Markdown, by its name."""
    return Path(name).suffix.lower() in MARKDOWN_ENDINGS


class TextSplitting:
    """Split text at its own structure, in time proportional to its length.

    Args:
        tokenizer: measures passages.
        max_tokens: most tokens of a passage.

    Raises:
        QCFuseError: if semantic-text-splitter is not installed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        plain, markdown = _import_splitters()
        self._plain = plain.from_huggingface_tokenizer(tokenizer.backend_tokenizer, max_tokens)
        self._markdown = markdown.from_huggingface_tokenizer(tokenizer.backend_tokenizer, max_tokens)
        self._max_tokens = max_tokens

    def split(self, text: str, *, markdown: bool) -> list[str]:
        """Return the passages of a text; page breaks of extracted PDF count as blank lines.

        A run of 1,024 characters without a space or an end of a sentence is cut by its length in bytes, because no
        token is shorter than a byte.
        """
        splitter = self._markdown if markdown else self._plain
        text = text.replace("\f", "\n\n")
        passages: list[str] = []
        end = 0
        for run in LONG_RUN.finditer(text):
            for part in _split_long_lines(text[end : run.start()]):
                passages += splitter.chunks(part)
            for piece in _cut_by_bytes(run[0], self._max_tokens):
                passages += self._plain.chunks(piece)
            end = run.end()
        for part in _split_long_lines(text[end:]):
            passages += splitter.chunks(part)
        return passages


def _import_splitters() -> tuple[Any, Any]:
    try:
        from semantic_text_splitter import MarkdownSplitter, TextSplitter
    except ImportError as error:
        raise QCFuseError(f"{error.name} is missing; run `pip install 'qcfuse-rag[cli]'`") from error
    return TextSplitter, MarkdownSplitter


def _is_inside(path: Path, resolved: Iterable[Path], skipped: Iterable[Path] = ()) -> bool:
    """Return whether a path, with its links followed, is in what is given, and not in what is skipped."""
    target = path.resolve()
    return any(map(target.is_relative_to, resolved)) and not any(map(target.is_relative_to, skipped))


def _read_file(path: Path, splitting: TextSplitting) -> Mapping[str, list[str]]:
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise QCFuseError(f"cannot read {path}: {error}") from error
    name = str(path.resolve())
    if not _is_unicode(name):
        raise QCFuseError(f"the name of {name.encode(errors='surrogateescape')!r} is not UTF-8; rename it")
    if path.suffix.lower() in JSON_LINES:
        return _read_lines(path, text, name, splitting)
    return {name: splitting.split(text, markdown=is_markdown(name))}


def _read_lines(path: Path, text: str, name: str, splitting: TextSplitting) -> PassagesBySource:
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
            raise QCFuseError(f"{path}, line {number}: not a JSON object with a `text` ({error})") from error
        if not isinstance(passage, str) or not isinstance(source, str):
            raise QCFuseError(f"{path}, line {number}: `text` and `source` must be strings")
        if not _is_unicode(passage + source):
            raise QCFuseError(f"{path}, line {number}: a \\u escape is a lone surrogate, which is not valid Unicode")
        passages.setdefault(source, []).extend(splitting.split(passage, markdown=False))
    return passages


def _is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogates, from undecodable bytes or escapes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _printable(text: str) -> str:
    return text.encode(errors="replace").decode()


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


def _cut_by_bytes(text: str, max_bytes: int) -> Iterator[str]:
    """Yield a text in pieces of at most `max_bytes` bytes, or of one character."""
    data, start = text.encode(), 0
    while start < len(data):
        stop = start + max(max_bytes, 4)
        while stop < len(data) and data[stop] & 0xC0 == 0x80:  # in the middle of a character
            stop -= 1
        yield data[start:stop].decode()
        start = stop
