"""The order of work on a simulated device: streams, events and vector clocks.

Vector clocks and epochs are those of FastTrack (Flanagan and Freund, 2009). An agent is the host or a stream. The work
of an agent precedes that of another only if somebody waited. The host's threads count as one agent.
"""

from __future__ import annotations

import itertools
import threading
from random import Random

HOST = 0
LAUNCH_S = 1e-6
"""Simulated seconds of each launch."""
_AGENT = 40
"""Bits below the agent in an epoch, `agent << 40 | number`, so that epochs fit integer arrays."""


def epoch_of(agent: int, number: int) -> int:
    return agent << _AGENT | number


def agent_of(epoch: int) -> int:
    return epoch >> _AGENT


class Clock(dict[int, int]):
    """The last epoch of each agent that is known to be complete."""

    def learn(self, other: Clock) -> None:
        for agent, epoch in other.items():
            self[agent] = max(self.get(agent, 0), epoch)

    def knows(self, epoch: int) -> bool:
        return epoch <= self.get(agent_of(epoch), 0)


class Host:
    """The host: its clock, and where it waited."""

    def __init__(self, seed: int) -> None:
        self.clock, self.lock, self.chance = Clock(), threading.RLock(), Random(seed)
        self.waits: dict[str, list[str]] = {}
        self.seconds = 0.0

    def wait(self, clock: Clock, why: str) -> None:
        with self.lock:
            self.waits.setdefault(threading.current_thread().name, []).append(why)
            self.clock.learn(clock)


class Stream:
    """Runs its launches in order; replaces `torch.cuda.Stream`."""

    def __init__(self, number: int, host: Host) -> None:
        self.number, self.clock, self._host = number, Clock(), host
        self._epochs = itertools.count(1)

    @property
    def cuda_stream(self) -> int:
        return self.number

    def tick(self) -> int:
        """Return the next epoch."""
        with self._host.lock:
            self.clock.learn(self._host.clock)
            epoch = epoch_of(self.number, next(self._epochs))
            self.clock[self.number] = epoch
            self._host.seconds += LAUNCH_S
            return epoch

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._host)
        with self._host.lock:
            self.clock.learn(self._host.clock)
            event.clock, event.at = Clock(self.clock), self._host.seconds
        return event

    def wait_event(self, event: Event) -> None:
        with self._host.lock:
            self.clock.learn(event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self._host.wait(self.clock, "a stream")


class Event:
    """A point in the work of a stream; replaces `torch.cuda.Event`."""

    def __init__(self, host: Host, *, timed: bool = False) -> None:
        self.clock, self._host, self._timed = Clock(), host, timed
        self.at = 0.0

    def synchronize(self) -> None:
        self._host.wait(self.clock, "an event")

    def query(self) -> bool:
        """Return whether the event has happened; at random if the host has not waited for it."""
        host = self._host
        with host.lock:
            happened = all(map(host.clock.knows, self.clock.values())) or host.chance.random() < 0.5
            if happened:
                host.clock.learn(self.clock)
            return happened

    def elapsed_time(self, later: Event) -> float:
        """Return milliseconds."""
        for event in (self, later):
            if not event._timed:
                raise ValueError("events must be created with argument 'enable_timing=True'")
            if not event.clock or not all(map(self._host.clock.knows, event.clock.values())):
                raise RuntimeError("the host does not know whether the event has happened")
        return (later.at - self.at) * 1000
