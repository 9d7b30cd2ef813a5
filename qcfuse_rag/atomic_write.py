"""Write a small file atomically: a reader sees the old one or the new one, whole."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: str | bytes, *, sync: bool = True) -> None:
    """Replace a file, readable by its owner only; creates the folder if need be.

    Args:
        path: of the file.
        content: its new content; text is written as UTF-8.
        sync: wait until it is on disk; not worth it for a file that is rewritten every second.

    Raises:
        OSError: if it cannot be written; the old file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        part.touch(mode=0o600)
        with part.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
