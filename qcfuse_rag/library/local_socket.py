"""The socket in a library's folder, at which its server answers the owner's commands on the same machine."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

NAME = "server.socket"


def listen(library: Path) -> socket.socket | None:
    """Return a listening socket that only the owner can use; None if a server listens there, or the folder has none.

    The file stays when its server ends; the next server replaces it.
    """
    if (running := connect(library)) is not None:
        running.close()
        return None
    path, listener = library / NAME, socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        path.unlink(missing_ok=True)  # of a server that has ended
        listener.bind(str(path))
        listener.listen()
    except OSError:  # such as a path of more than 107 bytes, or a file system without sockets
        listener.close()
        return None
    finally:
        os.umask(mask)
    return listener


def connect(library: Path) -> socket.socket | None:
    """Connect to the server of a library; None if none of this user runs."""
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(str(library / NAME))
        _, owner, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if owner == os.getuid():
            return client
    except OSError:
        pass
    client.close()
    return None
