"""Timestamps on the clock of the device that computes a pass.

A GPU runs behind its host. To time a stage by the host's clock, the host would have to wait for the device, which would
then run out of work. A timestamp is therefore an event that the device records and the host reads later.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTimestamp:
    """The time at which a device finished all work launched so far; on devices other than CUDA's, the time of creation.

    Attributes:
        at: seconds of the host's clock, or the CUDA event that the device records.
    """

    at: float | torch.cuda.Event

    @classmethod
    def on(cls, device: torch.device) -> DeviceTimestamp:
        """Return a timestamp of a device; the device may reach it later than the host."""
        if device.type != "cuda":
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
