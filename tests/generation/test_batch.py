"""A batch gets the answers of its single prompts, and the work for common prefixes is done once."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, Prompt, SamplingParams, make_method
from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.generation.batch import answer_many, shared_tokens, sharing_order
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.prefill_base import BLIND, FRAMED
from tests.support import references
from tests.support.cases import cases
from tests.support.engines import make_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES, QUESTION

FAMILIES = ["llama", "mistral-sliding", "gemma3-two-ropes", "gpt-oss-sinks"]
METHODS = {
    "full": make_method("full"),
    "reuse": make_method("reuse", base=FRAMED),
    "qcfuse": make_method("qcfuse", ratio=0.3),
    "epic": make_method("epic", n_tokens=4),
    "cacheblend": make_method("cacheblend"),
}
LENGTH = 6


@pytest.fixture(scope="module", params=cases(FAMILIES, "llama"))
def engine(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> FusionEngine:
    lm = LanguageModel.wrap(build_model(request.param), tokenizer, name=request.param)
    engine = make_engine(lm, MemoryStore())
    engine.warm(PASSAGES[:2], bases=(BLIND, FRAMED))  # the third is computed whenever it is asked for
    return engine


def batch(engine: FusionEngine) -> list[Prompt]:
    """Return prompts that share all, the first or no passages; one has all passages, and one has none."""
    first, second, third = PASSAGES
    retrieved = [
        [first, second],
        [second, first],
        [first, third],
        [first, second, third],
        [],
        [first, second],
        [third, first],
    ]
    prompts = [engine.prompt(f"{QUESTION} {i}", passages) for i, passages in enumerate(retrieved)]
    return [*prompts, prompts[0], engine.prompt(QUESTION, [first], history=[("user", "Hello."), ("assistant", "Yes?")])]


@pytest.mark.parametrize("name", cases(METHODS.keys(), "full", "cacheblend"))
def test_answers_are_those_of_one_by_one(engine: FusionEngine, name: str) -> None:
    prompts, params = batch(engine), SamplingParams(max_new_tokens=LENGTH)
    alone = [engine.generate(prompt, params, method=METHODS[name]) for prompt in prompts]
    together = answer_many(engine.runner, prompts, params, method=METHODS[name])
    assert [answer.ids for answer in together] == [answer.ids for answer in alone]
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    for mine, yours in zip(together, alone, strict=True):
        assert mine.report.selected == yours.report.selected
        assert mine.report.lookups == yours.report.lookups
        assert mine.report.rows + mine.report.reused_tokens == mine.report.prompt_tokens
        assert mine.report.bytes_loaded <= yours.report.bytes_loaded


def test_full_prefill_is_the_models_own(engine: FusionEngine) -> None:
    prompts = batch(engine)[:4]
    answers = answer_many(engine.runner, prompts, SamplingParams(max_new_tokens=LENGTH), method=METHODS["full"])
    for prompt, answer in zip(prompts, answers, strict=True):
        assert list(answer.ids) == references.greedy_continuation(engine.lm, prompt.ids, LENGTH)[: len(answer.ids)]


def test_every_beginning_is_computed_once(engine: FusionEngine) -> None:
    """The expected number comes from the tree of prefixes: its nodes, and every prompt's last segment."""
    prompts = batch(engine)
    nodes = {(p.prefix_ids, *(s.ids for s in p.segments[: n + 1])) for p in prompts for n in range(len(p.segments) - 1)}
    ends = sum(len(prompt.segments[-1].ids) for prompt in prompts)
    answers = answer_many(engine.runner, prompts, SamplingParams(max_new_tokens=1), method=METHODS["full"])
    assert sum(answer.report.rows for answer in answers) == sum(len(node[-1]) for node in nodes) + ends
    assert sum(answer.report.rows for answer in answers) < 0.8 * sum(map(len, prompts))


def test_every_shared_chunk_is_loaded_once(engine: FusionEngine) -> None:
    first, second, _ = PASSAGES
    prompts = [engine.prompt(f"{QUESTION} {i}", [first, second]) for i in range(5)]
    method, params = METHODS["reuse"], SamplingParams(max_new_tokens=1)
    alone = engine.generate(prompts[0], params, method=method).report
    hits = engine.store.stats()[0].hits
    reports = [answer.report for answer in answer_many(engine.runner, prompts, params, method=method)]
    assert sum(report.bytes_loaded for report in reports) == alone.bytes_loaded
    assert engine.store.stats()[0].hits - hits == 3, "the head and two passages"
    assert {report.rows for report in reports} == {alone.rows}


def test_prompts_of_other_wordings_share_nothing(engine: FusionEngine) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    assert shared_tokens(prompt, prompt) == len(prompt) - len(prompt.segments[-1].ids)
    assert shared_tokens(prompt, replace(prompt, prefix_ids=(1, 2, 3))) == 0
    assert shared_tokens(prompt, engine.prompt(QUESTION, PASSAGES[1:])) == len(prompt.segments[0].ids)


def test_sharers_are_neighbours(engine: FusionEngine) -> None:
    prompts = [engine.prompt(f"{QUESTION} {i}", [PASSAGES[i % 2], PASSAGES[2]]) for i in range(6)]
    kinds = [index % 2 for index in sharing_order(prompts)]
    assert kinds in ([0] * 3 + [1] * 3, [1] * 3 + [0] * 3)


def test_one_prompt_too_long_is_told_before_any_work(engine: FusionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [engine.prompt(QUESTION, PASSAGES), engine.prompt(QUESTION, PASSAGES * 8)]
    done: list[tuple[int, int]] = []
    with pytest.raises(PromptTooLong, match="context window"):
        answer_many(engine.runner, prompts, method=engine.method, progress=lambda *counts: done.append(counts))
    assert done == []


def test_progress_counts_answers(engine: FusionEngine) -> None:
    done: list[tuple[int, int]] = []
    prompts = batch(engine)[:3]
    answer_many(
        engine.runner,
        prompts,
        SamplingParams(max_new_tokens=1),
        method=engine.method,
        progress=lambda *counts: done.append(counts),
    )
    assert done == [(1, 3), (2, 3), (3, 3)]


def test_sampled_answers_follow_their_seed(engine: FusionEngine) -> None:
    prompts, params = batch(engine)[:3], SamplingParams(max_new_tokens=LENGTH, temperature=1.2, seed=3)
    alone = [engine.generate(prompt, params).ids for prompt in prompts]
    assert [answer.ids for answer in answer_many(engine.runner, prompts, params, method=engine.method)] == alone


def test_no_prompts_no_answers(engine: FusionEngine) -> None:
    assert answer_many(engine.runner, [], method=engine.method) == []


@pytest.mark.slow
def test_a_store_that_hangs_costs_each_prompt_its_limit_and_nothing_else(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = LanguageModel.wrap(build_model("llama"), tokenizer)
    engine = make_engine(lm, MemoryStore(), load_limit_s=0.3)
    engine.warm(PASSAGES[:2], bases=(BLIND, FRAMED))
    params, full = SamplingParams(max_new_tokens=2), METHODS["full"]
    prompts, released = batch(engine)[:2], threading.Event()
    expected = [engine.generate(prompt, params, method=full).ids for prompt in prompts]
    get = engine.store.get

    def hanging(key: ChunkKey) -> ChunkKV | Miss:
        assert released.wait(60)
        return get(key)

    monkeypatch.setattr(engine.store, "get", hanging)
    answers = answer_many(engine.runner, prompts, params, method=METHODS["reuse"])
    released.set()
    assert [answer.ids for answer in answers] == expected
    assert all("0.3 s" in str(answer.report.fallback) for answer in answers)
