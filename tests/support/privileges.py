"""Obey file permissions, which root otherwise ignores."""

from __future__ import annotations

import ctypes
import os
import struct
import sys

VERSION_3 = 0x20080522
DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2
"""Capabilities by which a process may read and write what file permissions forbid; see capabilities(7)."""


def obey_permissions() -> None:
    """Give up the capabilities to ignore permissions, in this thread and those that it starts."""
    if os.geteuid() != 0:
        return
    if not sys.platform.startswith("linux"):
        raise OSError("root cannot give up privileges here; run the tests as another user")
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = struct.pack("Ii", VERSION_3, 0), ctypes.create_string_buffer(24)
    if libc.capget(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    words = list(struct.unpack("6I", data.raw))  # effective, permitted and inheritable, for capabilities from 0 and 32
    for index in range(3):
        words[index] &= ~(1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH)
    if libc.capset(header, struct.pack("6I", *words)) != 0:
        raise OSError(ctypes.get_errno(), "capset")
