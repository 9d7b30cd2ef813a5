"""Open regular files only: a link, pipe or device in a file's place is an error and never blocks."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MAX_TEXT_BYTES = 16 << 20
"""Most bytes of a small text file, such as settings."""

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


def open_regular(path: Path) -> int:
    """Open a file for reading, unless the file or the folder it is in is a symbolic link; return the descriptor.

    Raises:
        OSError: if there is no such file, or there is something else in its place.
    """
    folder = open_folder(path.parent)
    try:
        return _checked(os.open(path.name, _READ | os.O_NOFOLLOW, dir_fd=folder), path)
    finally:
        os.close(folder)


def open_folder(path: Path, *inside: str) -> int:
    """Open a folder, or a folder inside of it, to work in it by descriptor; return the descriptor.

    Raises:
        OSError: if there is no such folder, or any of them is a symbolic link.
    """
    flags = _READ | os.O_DIRECTORY | os.O_NOFOLLOW
    descriptor = os.open(path, flags)
    for name in inside:
        try:
            below = os.open(name, flags, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = below
    return descriptor


def read_text(path: Path) -> str:
    """Return the text of a small file, which may be reached through links.

    Raises:
        OSError: if there is no such file, it is not a regular file, or it is too large.
        ValueError: if it is not UTF-8.
    """
    with open(_checked(os.open(path, _READ), path), "rb") as file:
        data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise OSError(errno.EFBIG, f"{path} has more than {MAX_TEXT_BYTES:,} bytes")
    return data.decode("utf-8")


def unlink_file(name: str, folder: int) -> bool:
    """Remove a file, or a link itself, from an open folder; return whether there was one. A folder is left alone."""
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            return False
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def is_regular(path: Path) -> bool:
    """Return whether there is a regular file at a path, not a link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _checked(descriptor: int, path: Path) -> int:
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, f"{path} is not a regular file")
