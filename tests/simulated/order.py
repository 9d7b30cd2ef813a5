"""What a device has done when: streams, events, and for each what it knows to be done.

A vector clock: work of one agent (the host, or a stream) comes before work of another only if somebody waited.
"""

from __future__ import annotations

import itertools
from random import Random

HOST = 0
_AGENT = 40
"""Bits below an agent's number; a deed is `agent << 40 | number`, so that arrays of them are integers."""


def deed_of(agent: int, number: int) -> int:
    return agent << _AGENT | number


def agent_of(deed: int) -> int:
    return deed >> _AGENT


class Clock(dict[int, int]):
    """By agent, the last of its deeds that is known to be done."""

    def learn(self, other: Clock) -> None:
        for agent, deed in other.items():
            self[agent] = max(self.get(agent, 0), deed)

    def knows(self, deed: int) -> bool:
        return deed <= self.get(agent_of(deed), 0)


class Stream:
    """What is launched on it happens in order; stands for `torch.cuda.Stream`.

    Args:
        number: as an agent.
        host: what the host knows, and with it whatever is launched from now on.
        chance: says whether what the host asks for has happened by then.
    """

    def __init__(self, number: int, host: Clock, chance: Random) -> None:
        self.number, self.clock = number, Clock()
        self._host, self._chance = host, chance
        self._deeds = itertools.count(1)

    def act(self) -> int:
        """Return the next deed, which comes after whatever the host knew when it was launched."""
        self.clock.learn(self._host)
        deed = deed_of(self.number, next(self._deeds))
        self.clock[self.number] = deed
        return deed

    def record_event(self) -> Event:
        self.clock.learn(self._host)
        return Event(Clock(self.clock), self._host, self._chance)

    def wait_event(self, event: Event) -> None:
        self.clock.learn(event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self._host.learn(self.clock)


class Event:
    """Something a stream will have done; stands for `torch.cuda.Event`."""

    def __init__(self, clock: Clock, host: Clock, chance: Random) -> None:
        self.clock, self._host, self._chance = clock, host, chance

    def synchronize(self) -> None:
        self._host.learn(self.clock)

    def query(self) -> bool:
        """Return whether it has happened; what the host has not waited for may have or not."""
        happened = all(map(self._host.knows, self.clock.values())) or self._chance.random() < 0.5
        if happened:
            self._host.learn(self.clock)
        return happened
