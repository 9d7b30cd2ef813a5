"""Map a file into memory without keeping it open: Python's `mmap` holds a descriptor for each mapping."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache

MAP_FAILED = ctypes.c_void_p(-1).value


class PrivateMapping:
    """The bytes of a file in writable memory. Changes stay in this process.

    The memory stays mapped as long as anything uses it, such as a view or a tensor made of a view.

    Args:
        descriptor: of the file, which may be closed afterwards.
        size: of the file in bytes, more than 0.

    Attributes:
        view: the bytes.

    Raises:
        OSError: if the file cannot be mapped.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        address = _c_library().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, 0)
        if address == MAP_FAILED:
            raise _last_error()
        self._address: int = address
        memory = (ctypes.c_ubyte * size).from_address(address)
        # Not at exit: other threads may still use the memory then.
        weakref.finalize(memory, _c_library().munmap, address, size).atexit = False
        self.view = memoryview(memory).cast("B")

    def advise(self, advice: int, start: int, stop: int) -> None:
        """Advise the system about a range of the bytes, see `madvise`; `start` is a multiple of the page size.

        Raises:
            OSError: if the system does not know the advice, or a page of the range cannot be read.
        """
        if _c_library().madvise(self._address + start, stop - start, advice):
            raise _last_error()


@cache
def _c_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
