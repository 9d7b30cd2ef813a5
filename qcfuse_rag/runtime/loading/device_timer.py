"""Moments of a pass, by the clock of the device that computes it.

A device works behind its host: to time its stages by the host's clock the host would have to wait for each, and the
device would be idle until it is given more. So a stage's beginning is an event on the device, looked at afterwards.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTimestamp:
    """When a device had done all that it was given so far; on a CPU, when this was made.

    Attributes:
        at: seconds of the host's clock, or what happens on the device.
    """

    at: float | torch.cuda.Event

    @classmethod
    def on(cls, device: torch.device) -> DeviceTimestamp:
        """Return the present moment of a device, which may lie in the host's future."""
        if device.type != "cuda":
            return cls(time.perf_counter())
        happens = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.current_stream(device).record_event(happens)
        return cls(happens)

    def wait(self) -> None:
        """Return when it has come."""
        if not isinstance(self.at, float):
            self.at.synchronize()

    def until(self, later: DeviceTimestamp) -> float:
        """Return the seconds to a later moment of the same device, both of which have come."""
        if isinstance(self.at, float) or isinstance(later.at, float):
            assert isinstance(self.at, float)
            assert isinstance(later.at, float)
            return later.at - self.at
        return float(self.at.elapsed_time(later.at)) / 1000
