"""Turns of conversations that go on, branch and end, under a bound that holds 64 of them: nothing leaks."""

from __future__ import annotations

import gc
import random
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, Prompt, SamplingParams, make_method
from qcfuse_rag.engine.engine_handle import EngineHandle
from qcfuse_rag.prompts.template import Turn
from qcfuse_rag.runtime.buffer import KVBuffer
from tests.stress.campaign import Tally, sized
from tests.support.engines import METHOD, make_engine
from tests.support.families import build_model, build_tokenizer
from tests.support.passages import PASSAGES, QUESTION

REQUESTS = sized(100, 2000)
CONVERSATIONS = sized(8, 64)
"""So many fit into the cache together, and half as many more are going on."""
MEAN_TOKENS, MAX_TURNS, AT_ONCE = 300, 5, 8
METHODS = (METHOD, METHOD, make_method("full"))
PARAMS = SamplingParams(max_new_tokens=4)
MOST_GROWTH = 16_000_000
"""Bytes by which the process may grow after the first third of the requests, of more than 300 kB each."""


def memory() -> tuple[int, int]:
    """Return the bytes of this process, and how many buffers of keys and values there are in it."""
    gc.collect()
    buffers = sum(type(each) is KVBuffer for each in gc.get_objects())
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(), buffers


class Talk:
    """Conversations that go on at the same time."""

    def __init__(self, seed: int = 0) -> None:
        self.random, self.begun = random.Random(seed), 0
        self.conversations: list[list[Turn]] = []

    def next_turns(self, count: int) -> Iterator[list[Turn]]:
        """Yield conversations whose next turn is to be answered: new ones, branches, and ones that go on."""
        for _ in range(count):
            if len(self.conversations) < CONVERSATIONS * 3 // 2:
                self.conversations.append(self.first_message())
            elif self.random.random() < 0.2:
                self.branch()
            yield self.conversations.pop(self.random.randrange(len(self.conversations)))

    def first_message(self) -> list[Turn]:
        self.begun += 1
        chosen = self.random.sample(PASSAGES, 2)
        return [("user", f"{self.begun}: " + "".join(f"{text}\n\n" for text in chosen) + QUESTION)]

    def branch(self) -> None:
        """Ask another question in place of one that was asked, or have the last one answered twice."""
        turns = self.random.choice(self.conversations)
        cut = self.random.randrange(0, len(turns), 2)
        self.conversations.append([*turns[:cut], ("user", f"Or {self.random.random()}?")] if cut else turns)

    def answered(self, turns: list[Turn], answer: str) -> None:
        if len(turns) < 2 * MAX_TURNS:
            self.conversations.append([*turns, ("assistant", answer), ("user", f"And {self.random.random()}?")])


def request_of(turns: list[Turn], engine: FusionEngine) -> tuple[Prompt, SamplingParams]:
    return engine.prompt_from_text(turns), PARAMS


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_conversations_that_branch_and_end_leak_nothing_and_stay_under_the_bound() -> None:
    lm = LanguageModel.wrap(
        build_model("llama", max_position_embeddings=2048), build_tokenizer(lambda: [*PASSAGES, QUESTION])
    )
    limit = CONVERSATIONS * MEAN_TOKENS * lm.kv_bytes_per_token
    engine = make_engine(lm, MemoryStore(), prefix_bytes=limit)
    engine.warm(PASSAGES)
    talk, tally, handle = Talk(), Tally("turns of conversations"), EngineHandle.wrap(engine)
    prompt_tokens = reused_tokens = most_kept = most_bytes = warmed_up = most_later = 0
    for _ in range(0, REQUESTS, AT_ONCE):
        requests = []
        for turns in talk.next_turns(AT_ONCE):
            build = partial(request_of, turns)
            requests.append((turns, handle.submit(build, method=talk.random.choice(METHODS))))
        while requests:
            turns, request = requests.pop()
            generation = request.result(60)
            talk.answered(turns, generation.text)
            prompt_tokens += generation.report.prompt_tokens
            reused_tokens += generation.report.prefix_tokens
            tally.trials += 1
        del request, generation
        kept, kept_bytes, (resident, buffers) = len(engine.prefixes), engine.prefixes.nbytes, memory()
        most_kept, most_bytes = max(most_kept, kept), max(most_bytes, kept_bytes)
        if kept_bytes > limit or buffers > kept:
            tally.errors.append(f"{kept} kept of {kept_bytes:,} bytes, and {buffers} buffers")
        if tally.trials <= REQUESTS // 3:
            warmed_up = max(warmed_up, resident)
        else:
            most_later = max(most_later, resident)
    handle.close()
    tally.note("conversations begun", talk.begun)
    tally.note("kept at most", most_kept)
    tally.note("their bytes at most", most_bytes)
    tally.note("of", limit)
    tally.note("% of prompt tokens reused", 100 * reused_tokens // prompt_tokens)
    tally.note("MB resident in the first third", warmed_up // 10**6)
    tally.note("MB later", most_later // 10**6)
    tally.finish()
    assert most_kept >= CONVERSATIONS
    assert most_later - warmed_up < MOST_GROWTH
