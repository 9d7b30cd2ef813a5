"""Hold a call to bounds on memory and time."""

from __future__ import annotations

import mmap
import resource
import signal
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


@contextmanager
def bounded(*, memory_bytes: int, cpu_s: float) -> Iterator[None]:
    """Let what runs inside take no more memory and processor time than it may.

    Python's own allocations are counted exactly; all others fail once they make the process larger by as much.

    Raises:
        AssertionError: if it took more memory.
        MemoryError: if it tried to take far more.
        TimeoutError: if it took longer.
    """

    def too_long(number: int, prefix_ids: FrameType | None) -> None:
        raise TimeoutError(f"more than {cpu_s:g} s")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    before = signal.signal(signal.SIGVTALRM, too_long)
    tracemalloc.start()
    resource.setrlimit(resource.RLIMIT_AS, (now + memory_bytes, limits[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        signal.signal(signal.SIGVTALRM, before)
    assert peak < memory_bytes, f"took {peak:,} bytes"
