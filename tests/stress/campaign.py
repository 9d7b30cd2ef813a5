"""What campaigns share: their size, what they count, and the line they print at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

FULL = os.environ.get("QCFUSE_STRESS") == "full"


MOST_SECONDS = 1200
"""Time after which a campaign begins no trial any more."""


def sized(small: int, full: int) -> int:
    """Return how large a campaign is to be."""
    return full if FULL else small


@dataclass
class Tally:
    """What happened in a campaign; `errors` is everything that should not have."""

    name: str
    trials: int = 0
    reads: int = 0
    wrong_bytes: int = 0
    errors: list[str] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def note(self, what: str, count: int = 1) -> None:
        """Count something remarkable."""
        self.notes[what] = self.notes.get(what, 0) + count

    def rounds(self, trials: int) -> Iterator[int]:
        """Yield the number of each trial while there is time, and print the campaign's line after every tenth."""
        for number in range(trials):
            if time.monotonic() - self.started > MOST_SECONDS:
                self.note("trials left out", trials - number)
                return
            self.trials += 1
            yield number
            if number % 10 == 9 and number + 1 < trials:
                self.show()

    def show(self) -> None:
        """Print the campaign's line, as far as it has come."""
        counts = [f"{self.trials:,} trials", f"{self.reads:,} reads", f"{self.wrong_bytes:,} wrong bytes"]
        counts += [f"{len(self.errors)} errors", f"{time.monotonic() - self.started:.0f} s"]
        notes = "; ".join(f"{what} {count:,}" for what, count in self.notes.items())
        print(f"\n[stress] {self.name}: {', '.join(counts)}{f' ({notes})' if notes else ''}", flush=True)

    def finish(self) -> None:
        """Print the campaign's line, and fail if a byte was wrong or anything else was."""
        self.show()
        assert not self.wrong_bytes, f"{self.wrong_bytes:,} bytes were read that nobody wrote"
        assert not self.errors, "\n".join(self.errors[:20])
