"""Find the files of documents as ripgrep does: hidden and ignored files are left out, and links are not followed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qcfuse_rag.errors import QCFuseError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

IGNORE_FILES = (".gitignore", ".ignore")
NEVER_DOCUMENTS = ("node_modules/", "__pycache__/")

HIDDEN = "hidden or ignored"
LINKS = "links to what is elsewhere; name that as well"
LOOPS = "links to nothing or to themselves"
NO_FILE = "neither files nor folders"

MOST_STARS, MOST_FOLDER_STARS = 3, 2
"""Most `*` and `**` of a pattern that is used. The time to match a name grows with the power of their number."""

MOST_IGNORE_CHARACTERS = 1 << 20

Rules = list[tuple[Path, "GitIgnoreSpec"]]
"""The patterns of ignore files, each with the folder that they are relative to; later ones count more."""

Unread = dict[str, list[str]]
"""Paths that are not read, by the reason. They are relative to the folder that holds all named paths."""


def find_files(paths: Iterable[Path], skip: Sequence[Path] = (), unread: Unread | None = None) -> list[Path]:
    """Return the files among paths and in folders, in order and each once.

    What is named is a file to read even if it is hidden, ignored or a link.

    Args:
        paths: files and folders.
        skip: folders and files that are left out if they are in one of the named folders, without a word.
        unread: receives what else is left out in folders.

    Raises:
        QCFuseError: if a path is no file or folder.
    """
    named = list(paths)
    inside, skipped = [real_path(path) for path in named], {real_path(path) for path in skip}
    found: dict[Path, Path] = {}  # by the path without links
    for path in named:
        if path.is_dir():
            files = sorted(_walk(path, inside, skipped, partial(add_unread, {} if unread is None else unread, named)))
        elif path.is_file():
            files = [path]
        else:
            raise QCFuseError(
                f"{path} is no file to read" if path.exists() else f"there is no file or folder at {path}"
            )
        for file in files:
            found.setdefault(real_path(file), file)
    return list(found.values())


def add_unread(unread: Unread, named: Sequence[Path], reason: str, path: Path) -> None:
    """Add a path to what is not read because of a reason."""
    shared = os.path.commonpath([real_path(each if each.is_dir() else each.parent) for each in named])
    relative = os.path.relpath(real_path(path.parent) / path.name, shared)
    shown = (relative + "/" * (path.is_dir() and not path.is_symlink())).encode(errors="replace").decode()
    if shown not in (paths := unread.setdefault(reason, [])):
        paths.append(shown)


def real_path(path: Path) -> Path:
    """Return an absolute path without links, as far as they lead anywhere; `Path.resolve` raises for a loop."""
    return Path(os.path.realpath(path))


def _walk(top: Path, inside: Sequence[Path], skipped: set[Path], note: Callable[[str, Path], None]) -> Iterator[Path]:
    folders = [(top, [(real_path(top), _patterns(NEVER_DOCUMENTS)), *_rules_above(real_path(top))])]
    while folders:
        folder, rules = folders.pop()
        rules = [*rules, *_rules_in(folder)]
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            note(unreadable(error), folder)
            continue
        for entry in entries:
            path = Path(entry.path)
            is_folder = entry.is_dir(follow_symlinks=False)
            ignored = _is_ignored(real_path(folder) / entry.name, rules, is_folder)
            if ignored or (ignored is None and entry.name.startswith(".")):
                note(HIDDEN, path)
            elif entry.is_symlink():
                if not path.exists():
                    note(LOOPS, path)
                elif not any(map(real_path(path).is_relative_to, inside)):  # else it is read by its own path
                    note(LINKS, path)
            elif real_path(path) in skipped:
                continue
            elif is_folder:
                folders.append((path, rules))
            elif entry.is_file(follow_symlinks=False):
                yield path
            else:
                note(NO_FILE, path)


def unreadable(error: OSError) -> str:
    """Return the reason why the system cannot read a path."""
    return f"cannot be read ({error.strerror or error})"


def _is_ignored(path: Path, rules: Rules, is_folder: bool) -> bool | None:
    """Return whether a path is ignored; False if it is named as an exception, None if no pattern matches."""
    for folder, spec in reversed(rules):
        relative = os.path.relpath(path, folder) + "/" * is_folder
        if (include := spec.check_file(relative).include) is not None:
            return include
    return None


def _rules_above(folder: Path) -> Rules:
    """Return the patterns of the repository around a folder, but for those that ignore the folder, which was named."""
    above = list(folder.parents)
    root = next((parent for parent in (folder, *above) if (parent / ".git").exists()), folder)
    rules = [rule for parent in reversed(above) if parent.is_relative_to(root) for rule in _rules_in(parent)]
    return [rule for rule in rules if not _is_ignored(folder, [rule], True)]


def _rules_in(folder: Path) -> Rules:
    """Return the patterns of a folder's ignore files, which follow those of the folders above."""
    rules: Rules = []
    for name in IGNORE_FILES:
        with suppress(OSError):
            if (folder / name).is_file():
                with (folder / name).open(errors="replace") as file:
                    rules.append((real_path(folder), _patterns(file.read(MOST_IGNORE_CHARACTERS).splitlines())))
    return rules


def _patterns(lines: Iterable[str]) -> GitIgnoreSpec:
    """Return patterns without those that are not valid, as Git does, and those that take long to match."""
    from pathspec import GitIgnoreSpec

    kept: list[str] = []
    for line in lines:
        parts = line.split("/")
        if parts.count("**") <= MOST_FOLDER_STARS and all(part.count("*") <= MOST_STARS for part in parts):
            with suppress(ValueError, re.error):
                GitIgnoreSpec.from_lines([line])
                kept.append(line)
    return GitIgnoreSpec.from_lines(kept)
