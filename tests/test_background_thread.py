"""Programs that end without closing anything: no thread is stopped in the middle of an operation."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from qcfuse_rag.background_thread import BackgroundThread

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

FORKING = """
import os
if pid := os.fork():
    assert os.waitpid(pid, 0)[1] == 0
"""


def output(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_a_thread_that_computes_is_ended_first_and_a_forked_process_does_not_wait_for_it() -> None:
    assert output(BUSY + FORKING) == "closed\n", "the parent's, once"


@pytest.mark.slow
def test_a_program_may_end_in_the_middle_of_an_answer() -> None:
    assert output(ANSWERING) == "begun\n"


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
