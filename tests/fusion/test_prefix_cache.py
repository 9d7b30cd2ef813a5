"""Which beginnings of a prompt may be reused, and what is kept."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, Prompt, SamplingParams, make_method
from qcfuse_rag.fusion.method import IN_FULL, PrefillEstimate
from qcfuse_rag.fusion.prefix_cache import CachedSequence, PrefixCache
from qcfuse_rag.prompts.segments import Role, Segment
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.cost import Costs
from tests.support.engines import METHOD, make_engine, make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION

FULL_PREFILL = make_method("full")
METHODS = (FULL_PREFILL, METHOD, make_method("qcfuse", ratio=0.5), make_method("reuse"))
PARAMS = SamplingParams(max_new_tokens=6)
BYTES_PER_TOKEN = 2 * 4


def sequence(prompt: Prompt, method: int, exact: int) -> CachedSequence:
    """Return a sequence whose memory says for each position whether it is exact, and else by which method it is."""
    marks = torch.tensor([0.0 if position < exact else 1.0 + method for position in range(len(prompt))])
    buffer = KVBuffer((marks[None, None, :, None].clone(),), (marks[None, None, :, None].clone(),))
    passages = tuple((span.start, span.stop) for span in prompt.chunks)
    return CachedSequence(np.array(prompt.ids), buffer, exact, METHODS[method], passages, len(prompt))


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Draw prompts of few different pieces, so that many of them begin alike, cut in different ways into segments."""
    pieces = [tuple(range(10, 22)), tuple(range(30, 39)), (7,) * 10, (10, 11, 12)]
    roles = [Role.TEXT, Role.CHUNK]
    drawn = draw(st.lists(st.tuples(st.sampled_from(roles), st.sampled_from(pieces)), min_size=1, max_size=8))
    segments = [Segment(role, ids, "") for role, ids in drawn]
    if segments[0].role is Role.TEXT and draw(st.booleans()):
        segments[0] = Segment(Role.SYSTEM_PREFIX, segments[0].ids, "")
    return Prompt((*segments, Segment(Role.QUESTION, draw(st.sampled_from(pieces)), "")))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(prompts(), st.integers(0, 3), st.integers(0, 200)), max_size=8),
    prompts(),
    st.integers(0, 3),
    st.integers(0, 400),
)
def test_nothing_is_reused_that_the_request_would_not_have_computed(
    earlier: list[tuple[Prompt, int, int]], prompt: Prompt, method: int, limit_tokens: int
) -> None:
    cache = PrefixCache(limit_tokens * BYTES_PER_TOKEN)
    for other, other_method, exact in earlier:
        exact = len(other) if METHODS[other_method].base is None else min(exact, len(other))
        cache.put(sequence(other, other_method, exact), 0)
        assert cache.nbytes <= cache.limit_bytes
    lease = cache.lease(prompt, METHODS[method])
    assert lease.held == cache.reusable_tokens(prompt, METHODS[method]) < len(prompt)
    if not lease.held:
        return
    kept = next(kept for kept in cache._sequences if kept.buffer is lease._source)
    assert tuple(kept.ids[: lease.held]) == prompt.ids[: lease.held]
    marks = set(kept.buffer.keys[0][0, 0, : lease.held, 0].tolist())
    assert marks <= {0.0, 1.0 + method}, "exact, or of the same method"
    assert lease.exact_tokens == int((kept.buffer.keys[0][0, 0, : lease.held, 0] == 0).sum())
    if METHODS[method].base is None:
        assert marks == {0.0}
        return
    inside = [span for span in prompt.spans if span.segment.role in (Role.SYSTEM_PREFIX, Role.CHUNK)]
    assert not any(span.start < lease.held < span.stop for span in inside), "no passage is cut"
    if marks != {0.0}:
        ours = [(span.start, span.stop) for span in prompt.chunks if span.start < lease.held]
        assert ours == [passage for passage in kept.passages if passage[0] < lease.held]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(prompts(), st.integers(0, 3), st.integers(0, 200)), max_size=8), prompts())
def test_dropping_covered_sequences_loses_nothing(earlier: list[tuple[Prompt, int, int]], prompt: Prompt) -> None:
    cache, everything = PrefixCache(1 << 30), []
    for other, method, exact in earlier:
        exact = len(other) if METHODS[method].base is None else min(exact, len(other))
        everything.append(sequence(other, method, exact))
        cache.put(everything[-1], 0)
    ids = np.array(prompt.ids[:-1])
    for method in METHODS:
        best = max((kept.reusable_tokens(prompt, ids, method) for kept in everything), default=0)
        assert max((kept.reusable_tokens(prompt, ids, method) for kept in cache._sequences), default=0) == best


@pytest.fixture
def keeping(llama: LanguageModel) -> FusionEngine:
    return make_warmed_engine(llama, prefix_bytes=1 << 30)


def test_the_same_question_again_computes_one_row(keeping: FusionEngine) -> None:
    prompt = keeping.prompt(QUESTION, PASSAGES)
    first, again = keeping.generate(prompt, PARAMS), keeping.generate(prompt, PARAMS)
    assert again.ids == first.ids
    assert (again.report.rows, again.report.prefix_tokens) == (1, len(prompt) - 1)
    assert again.usage.reused_tokens == len(prompt) - 1
    assert len(keeping.prefixes) == 1


def test_edited_history_reuses_what_comes_before_the_edit(llama: LanguageModel) -> None:
    keeping = make_engine(llama, MemoryStore(), method=FULL_PREFILL, prefix_bytes=1 << 30)
    said = [("user", "Good morning, harbour master."), ("assistant", "Good morning."), ("user", "Any news?")]
    keeping.generate(keeping.prompt_from_text(said), PARAMS)
    edited = [*said[:2], ("user", "Any ferry?")]
    report = keeping.generate(keeping.prompt_from_text(edited), PARAMS).report
    same = keeping.prompt_from_text(said).ids, keeping.prompt_from_text(edited).ids
    expected = next(i for i, (ours, theirs) in enumerate(zip(*same, strict=False)) if ours != theirs)
    assert report.prefix_tokens == expected
    assert len(keeping.prefixes) == 2, "both branches are kept"


def test_a_request_with_a_method_of_its_own_neither_takes_nor_leaves_anything(keeping: FusionEngine) -> None:
    prompt = keeping.prompt(QUESTION, PASSAGES)
    for method, held in ((FULL_PREFILL, 0), (None, 0), (None, len(prompt) - 1), (FULL_PREFILL, 0), (METHOD, 0)):
        assert keeping.generate(prompt, PARAMS, method=method).report.prefix_tokens == held


class RefusesBehindAPrefix:
    """A guard that computes in full whatever another request has begun."""

    def refusal(self, estimate: PrefillEstimate, costs: Costs) -> str | None:
        return f"{IN_FULL}: a prefix is held" if estimate.held_tokens else None


def test_what_a_guard_has_computed_in_full_is_exact_behind_a_fused_prefix(llama: LanguageModel) -> None:
    keeping = make_warmed_engine(llama, method=replace(METHOD, guard=RefusesBehindAPrefix()), prefix_bytes=1 << 30)
    kept = keeping.stream(keeping.prompt(QUESTION, PASSAGES[:2]), PARAMS)
    kept.result()
    prompt = keeping.prompt(QUESTION, PASSAGES)
    assert 0 < kept.prefilled.exact_tokens < prompt.chunks[2].start
    again = keeping.stream(prompt, PARAMS).prefilled
    assert again.report.fallback is not None
    assert again.report.prefix_tokens == kept.prefilled.exact_tokens
    assert again.exact_tokens == len(prompt)
    full = keeping.prefill(prompt, method=FULL_PREFILL)
    assert torch.allclose(again.logits, full.logits, atol=1e-4)


def test_healed_answers_give_exact_prefixes(keeping: FusionEngine) -> None:
    prompt = keeping.prompt(QUESTION, PASSAGES)
    exact = keeping.generate(prompt, SamplingParams(max_new_tokens=8, fidelity="exact"))
    (kept,) = keeping.prefixes._sequences
    assert kept.exact_tokens == len(kept)
    assert exact.ids == keeping.generate(prompt, SamplingParams(max_new_tokens=8), method=FULL_PREFILL).ids


def test_exact_answers_are_exact_behind_a_reused_fused_prefix(keeping: FusionEngine) -> None:
    first = keeping.prompt(QUESTION, PASSAGES)
    keeping.generate(first, PARAMS)
    found = keeping.generate(first, SamplingParams(max_new_tokens=8, fidelity="exact"))
    assert found.report.prefix_tokens
    assert found.ids == keeping.generate(first, SamplingParams(max_new_tokens=8), method=FULL_PREFILL).ids
    assert found.verified_upto == len(found.ids)


def test_forgetting_a_document_drops_everything_also_of_running_requests(keeping: FusionEngine) -> None:
    prompt = keeping.prompt(QUESTION, PASSAGES)
    keeping.generate(prompt, PARAMS)
    running = keeping.stream(keeping.prompt("Why?", PASSAGES), PARAMS)
    keeping.forget("nowhere.md")
    running.result()
    assert len(keeping.prefixes) == 0


def test_cancelled_answers_are_kept_as_far_as_they_came(keeping: FusionEngine) -> None:
    prompt, cancel = keeping.prompt(QUESTION, PASSAGES), threading.Event()
    stream = keeping.stream(prompt, SamplingParams(max_new_tokens=40), cancel=cancel)
    next(stream)
    cancel.set()
    generation = stream.result()
    assert generation.finish_reason == "cancelled"
    (kept,) = keeping.prefixes._sequences
    assert len(kept) == len(prompt) + len(generation.ids) - 1


def test_engines_that_are_loaded_by_name_keep_requests(model_folder: str) -> None:
    with FusionEngine.load(model_folder, device="cpu", verdict="ignore") as loaded:
        prompt = loaded.prompt(QUESTION, PASSAGES)
        assert [loaded.generate(prompt, PARAMS).report.prefix_tokens for _ in range(2)] == [0, len(prompt) - 1]
    assert len(loaded.prefixes) == 0, "closed"
    with FusionEngine.load(model_folder, device="cpu", verdict="ignore", prefix_bytes=0) as loaded:
        assert [loaded.generate(prompt, PARAMS).report.prefix_tokens for _ in range(2)] == [0, 0]


def test_measuring_reuses_nothing(keeping: FusionEngine) -> None:
    prompt = keeping.prompt(QUESTION, PASSAGES)
    keeping.generate(prompt, PARAMS)
    assert keeping.prefill(prompt).report.prefix_tokens == 0


@pytest.mark.slow
def test_memory_stays_under_the_limit_and_is_not_lost(llama: LanguageModel) -> None:
    limit = 500 * llama.kv_bytes_per_token
    engine = make_warmed_engine(llama, prefix_bytes=limit)
    for number in range(40):
        engine.generate(engine.prompt(f"Why {number}?", PASSAGES[: number % 4]), PARAMS)
        assert 0 < engine.prefixes.nbytes <= limit
    assert engine.runner.pool.spare_bytes < 40 * limit


def test_cached_prompts_make_room_for_a_request_that_finds_no_memory(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they would otherwise fail a request that had memory without them."""
    keeping = make_engine(llama, MemoryStore(), method=FULL_PREFILL, prefix_bytes=1 << 30)
    question = keeping.prompt(QUESTION, PASSAGES)
    expected = keeping.generate(question, PARAMS).ids
    assert len(keeping.prefixes) == 1
    allocate, refused = KVBuffer.allocate, list[int]()

    def full_until_freed(*args: object, **kwargs: object) -> KVBuffer:
        if len(keeping.prefixes):
            refused.append(1)
            raise torch.OutOfMemoryError("no memory")
        return allocate(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(KVBuffer, "allocate", full_until_freed)
    assert keeping.generate(question, PARAMS).ids == expected
    assert refused == [1]
    monkeypatch.setattr(KVBuffer, "allocate", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("none")))
    with pytest.raises(torch.OutOfMemoryError):
        keeping.generate(question, PARAMS)


def test_an_answer_whose_keys_cannot_be_copied_is_not_cached(
    keeping: FusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    lease = keeping.prefixes.lease(keeping.prompt(QUESTION), FULL_PREFILL)
    buffer = keeping.runner.allocate(4096)
    monkeypatch.setattr(torch.Tensor, "clone", no_memory)
    lease.put(keeping.prompt(QUESTION), [], buffer, 0)
    monkeypatch.undo()
    assert len(keeping.prefixes) == 0


def test_what_leaves_a_store_in_memory_is_in_no_prefix_either(keeping: FusionEngine) -> None:
    keeping.warm(PASSAGES, sources=["mill.md"] * len(PASSAGES))
    prompt = keeping.prompt(QUESTION, PASSAGES)
    keeping.generate(prompt, PARAMS)
    keeping.prefill(prompt)
    assert len(keeping.prefixes) == 1
    keeping.warm(PASSAGES[:1], sources=["mill.md"])
    keeping.prefill(prompt)
    assert len(keeping.prefixes) == 0
