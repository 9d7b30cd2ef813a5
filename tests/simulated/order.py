"""What a device has done when: streams, events, and for each what it knows to be done.

Vector clocks and epochs as in FastTrack (Flanagan and Freund, 2009): work of one agent, the host or a stream, comes
before work of another only if somebody waited. The host's threads count as one agent.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from random import Random

HOST = 0
LAUNCH_S = 1e-6
"""What the device takes for whatever it is given."""
_AGENT = 40
"""Bits below an agent's number; an epoch is `agent << 40 | number`, so that arrays of them are integers."""


def epoch_of(agent: int, number: int) -> int:
    return agent << _AGENT | number


def agent_of(epoch: int) -> int:
    return epoch >> _AGENT


class Clock(dict[int, int]):
    """By agent, the last of its epochs that is known to be done."""

    def learn(self, other: Clock) -> None:
        for agent, epoch in other.items():
            self[agent] = max(self.get(agent, 0), epoch)

    def knows(self, epoch: int) -> bool:
        return epoch <= self.get(agent_of(epoch), 0)


class Host:
    """What the host knows to be done, and where it waited for that.

    Args:
        seed: of what is left to chance.
        refuses: whether the calling thread may not wait.

    Attributes:
        turn: held by whoever changes a clock or memory.
        waits: by the name of each thread, where it waited.
        seconds: of the device's clock.
    """

    def __init__(self, seed: int, refuses: Callable[[], bool]) -> None:
        self.clock, self.turn, self.chance = Clock(), threading.RLock(), Random(seed)
        self.waits: dict[str, list[str]] = {}
        self.seconds = 0.0
        self._refuses = refuses

    def wait(self, clock: Clock, why: str) -> None:
        with self.turn:
            if self._refuses():
                raise RuntimeError(f"called a synchronizing CUDA operation: {why}")
            self.waits.setdefault(threading.current_thread().name, []).append(why)
            self.clock.learn(clock)


class Stream:
    """What is launched on it happens in order; stands for `torch.cuda.Stream`.

    Args:
        number: as an agent.
        host: whatever it knows comes before what is launched from now on.
    """

    def __init__(self, number: int, host: Host) -> None:
        self.number, self.clock, self._host = number, Clock(), host
        self._epochs = itertools.count(1)

    def tick(self) -> int:
        """Return the next epoch."""
        with self._host.turn:
            self.clock.learn(self._host.clock)
            epoch = epoch_of(self.number, next(self._epochs))
            self.clock[self.number] = epoch
            self._host.seconds += LAUNCH_S
            return epoch

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._host)
        with self._host.turn:
            self.clock.learn(self._host.clock)
            event.clock, event.at = Clock(self.clock), self._host.seconds
        return event

    def wait_event(self, event: Event) -> None:
        with self._host.turn:
            self.clock.learn(event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self._host.wait(self.clock, "a stream")


class Event:
    """Something a stream will have done; stands for `torch.cuda.Event`."""

    def __init__(self, host: Host, *, timed: bool = False) -> None:
        self.clock, self._host, self._timed = Clock(), host, timed
        self.at = 0.0

    def synchronize(self) -> None:
        self._host.wait(self.clock, "an event")

    def query(self) -> bool:
        """Return whether it has happened; what the host has not waited for may have or not."""
        host = self._host
        with host.turn:
            happened = all(map(host.clock.knows, self.clock.values())) or host.chance.random() < 0.5
            if happened:
                host.clock.learn(self.clock)
            return happened

    def elapsed_time(self, later: Event) -> float:
        """Return milliseconds."""
        for one in (self, later):
            if not one._timed:
                raise ValueError("events must be created with argument 'enable_timing=True'")
            if not one.clock or not all(map(self._host.clock.knows, one.clock.values())):
                raise RuntimeError("the host does not know whether the event has happened")
        return (later.at - self.at) * 1000
