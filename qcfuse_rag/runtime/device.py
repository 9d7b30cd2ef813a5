"""Copy tensors to the device that computes, and wait for it: CPUs, CUDA, and Apple's GPUs (`mps`).

A copy from ordinary memory to a CUDA device may be left to the device: torch keeps the source until then. On Apple's
GPUs torch does not keep it: a temporary tensor may be freed and its memory overwritten before the copy reads it
(pytorch/pytorch#189690). So the host waits there. Nothing else differs: Apple's GPUs run the code of CPUs, without
kernels, recorded passes and page-locked memory, all of which ask for CUDA.

A GPU runs behind its host. To time a stage by the host's clock, the host would have to wait for the device, which would
then run out of work. A `DeviceTimestamp` is therefore an event that the device records and the host reads later.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor


def copies_ahead(device: torch.device) -> bool:
    """Return whether the host may go on, and free the source, before a copy to a device has ended."""
    return device.type == "cuda"


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; the host waits for the copy unless `copies_ahead`."""
    return tensor.to(device, non_blocking=copies_ahead(device))


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy a tensor into another one; the host waits unless `copies_ahead` on the target's device."""
    target.copy_(source, non_blocking=copies_ahead(target.device))


def finish(device: torch.device) -> None:
    """Wait until a device has done all work that was launched on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTimestamp:
    """The time at which a device finished all work launched so far; on devices other than CUDA's, the time of creation.

    Attributes:
        at: seconds of the host's clock, or the CUDA event that the device records.
    """

    at: float | torch.cuda.Event

    @classmethod
    def on(cls, device: torch.device) -> DeviceTimestamp:
        """Return a timestamp of a device; a CUDA device may reach it later than the host, which waits for others."""
        if device.type != "cuda":
            finish(device)
            return cls(time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.current_stream(device).record_event(event)
        return cls(event)

    def wait(self) -> None:
        """Block until the device has reached the timestamp."""
        if not isinstance(self.at, float):
            self.at.synchronize()

    def seconds_until(self, later: DeviceTimestamp) -> float:
        """Return the seconds to a later timestamp of the same device, which must have reached both."""
        if isinstance(self.at, float) or isinstance(later.at, float):
            assert isinstance(self.at, float)
            assert isinstance(later.at, float)
            return later.at - self.at
        return float(self.at.elapsed_time(later.at)) / 1000
