"""Something else in every place of a store, in front of every operation, before and after the store is opened.

No operation takes longer than 10 s, fails without a name, or touches anything outside of the store.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.testing import example_key
from qcfuse_rag.store.wipe import wipe
from tests.store.disk.folders import put
from tests.store.disk.planted import KINDS, OPERATIONS, PLACES, everything, make_outside, plant
from tests.stress.campaign import Tally, sized

MOST_SECONDS = 10


class TooSlow(BaseException):
    """No handler of the library takes this for one of its own errors."""


@pytest.fixture
def alarm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], object]]:
    """Give a function that lets everything fail after some seconds, or not any more."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    before = signal.signal(signal.SIGALRM, stop)
    yield signal.alarm
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_planted_before_any_operation_does_harm(tmp_path: Path, alarm: Callable[[int], object]) -> None:
    tally = Tally("something else in a place of the store")
    fresh, folder, outside = tmp_path / "fresh", tmp_path / "kv", make_outside(tmp_path / "outside")
    with DiskStore(fresh) as store, closing(Sources(store)) as sources:
        put(store, 0, 1, 2)
        store.discard(example_key(2), "looks odd")
        sources.replace("kept", [example_key(1)])
    before = everything(outside)
    operations = {**OPERATIONS, "wipe": lambda store: wipe(store.folder)}
    trials = list(itertools.product(PLACES.items(), KINDS, operations.items(), (False, True)))
    tally.note("kinds of things in places", len(PLACES) * len(KINDS))
    tally.note("operations", len(operations))
    for (place, path), kind, (name, operation), opened_before in random.Random(0).sample(
        trials, sized(400, len(trials))
    ):
        tally.trials += 1
        shutil.copytree(fresh, folder, symlinks=True)
        alarm(MOST_SECONDS)
        try:
            if opened_before:
                with DiskStore(folder) as store:
                    plant(folder, path, kind, outside)
                    operation(store)
            else:
                plant(folder, path, kind, outside)
                with DiskStore(folder) as store:
                    operation(store)
        except StoreError:
            tally.note("errors with a name")
        except (Exception, TooSlow):
            tally.errors.append(f"{kind} as {place}, {name}, opened before: {opened_before}: {traceback.format_exc()}")
        finally:
            alarm(0)
        if everything(outside) != before:
            tally.errors.append(f"{kind} as {place}, {name}: something outside was touched")
            shutil.rmtree(outside)
            before = everything(make_outside(outside))
        shutil.rmtree(folder)
    tally.finish()
