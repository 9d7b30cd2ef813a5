"""Bound torch's threads by the process's share of the machine: what exceeds a quota is stopped, and the others wait."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import torch


def bound_threads(root: Path = Path("/")) -> None:
    """Lower torch's threads to the share, unless the user has set their number in the environment or in torch.

    It is torch's own if it is the number of processors that the process may use, of which more are no use, or of cores.
    """
    if os.environ.keys() & {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} or not hasattr(os, "sched_getaffinity"):
        return
    processors, threads = os.sched_getaffinity(0), torch.get_num_threads()
    siblings = [root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list" for number in processors]
    cores = {path.read_text("ascii") for path in siblings if path.is_file()}
    if threads >= len(processors) or threads == len(cores):
        torch.set_num_threads(math.ceil(min(threads, len(processors), *quotas(root))))


def quotas(root: Path = Path("/")) -> Iterator[float]:
    """Yield the quotas of the control groups (v1, v2) around this process, in processors; there may be none.

    In a container the path of its group may begin outside of what is mounted.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text("utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            folder = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
            for part in PurePosixPath(group).parts:
                folder /= part.strip("/")
                with suppress(OSError, ValueError):  # "max" is no number
                    quota, period = (int(word) for name in names for word in (folder / name).read_text("ascii").split())
                    yield quota / period if quota > 0 else math.inf  # -1 is none
