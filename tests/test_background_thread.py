"""Programs that end without closing anything: no thread is stopped in the middle of an operation."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.background_thread import BackgroundThread
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.testing import example_key

ROOT = Path(__file__).parent.parent

BUSY = """
import time, torch
from qcfuse_rag.background_thread import BackgroundThread

class Multiplying:
    def __init__(self):
        self.closed, self.products = False, 0
        self.thread = BackgroundThread(self.run, name="multiplying", close=self.close)
    def run(self):
        while not self.closed:
            torch.ones(512, 512) @ torch.ones(512, 512)
            self.products += 1
    def close(self):
        self.closed = True
        self.thread.join()
        print("closed")

owner = Multiplying()
while not owner.products:
    time.sleep(.01)
"""

ANSWERING = """
from qcfuse_rag import LanguageModel, MemoryStore, SamplingParams, Scheduler
from tests.support.engines import make_engine
from tests.support.fixed_model import fixed_model, fixed_tokenizer

engine = make_engine(LanguageModel.wrap(fixed_model(), fixed_tokenizer()), MemoryStore())
request = Scheduler(engine).submit(engine.prompt("Who?"), SamplingParams(max_new_tokens=800))
next(iter(request))
print("begun")
"""

WRITING = """
from qcfuse_rag import DiskStore, MemoryStore, TieredStore
from qcfuse_rag.store.testing import example_chunk, example_key

store = TieredStore(MemoryStore(), DiskStore({folder!r}), write_behind_bytes=1 << 30)
for number in range(40):
    store.put(example_key(number), example_chunk())
"""

FORKING = """
import os
pid = os.fork()
"""

FORKED = """
if pid:
    assert os.waitpid(pid, 0)[1] == 0
"""


def output(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_a_thread_that_computes_is_ended_first() -> None:
    assert output(BUSY) == "closed\n"


def test_a_program_may_end_in_the_middle_of_an_answer() -> None:
    assert output(ANSWERING) == "begun\n"


def test_queued_chunks_are_written_before_the_program_ends(tmp_path: Path) -> None:
    output(WRITING.format(folder=str(tmp_path)))
    with DiskStore(tmp_path) as store:
        assert all(isinstance(store.get(example_key(number)), ChunkKV) for number in range(40))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_wait_for_threads_it_has_not() -> None:
    assert output(BUSY + FORKING + FORKED) == "closed\n", "the parent's, once"


def test_an_ended_thread_keeps_its_owner_no_longer() -> None:
    class Owner:
        def __init__(self) -> None:
            self.ended = threading.Event()
            self.thread = BackgroundThread(self.ended.wait, name="waiting", close=self.close)

        def close(self) -> None:
            self.ended.set()
            self.thread.join()

    owner = Owner()
    alive = weakref.ref(owner)
    owner.close()
    del owner
    assert alive() is None, gc.get_referrers(alive())
