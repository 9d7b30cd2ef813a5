"""Cache-Craft: which stored cache is closest, which of its tokens are recomputed, and until which layer."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from qcfuse_rag import FusionEngine, LanguageModel, Prompt, make_method
from qcfuse_rag.methods.cachecraft import ClosestVariant, FocusedChunks
from qcfuse_rag.methods.captures.attention import captured_overlap, expected_overhead, worth_by_savings
from qcfuse_rag.methods.captures.slots import context_of, fact
from qcfuse_rag.methods.common import TopPerChunk
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import FRAMED, ChunkKey, hash_ids
from qcfuse_rag.store.testing import example_chunk
from tests.support import references
from tests.support.engines import capture, chunk_lookups, make_warmed_engine, slots_of
from tests.support.passages import PASSAGES, QUESTION
from tests.support.references import error

TOLERANCE = 1e-4
A, B, C = PASSAGES
D = "Mondays are quiet in the harbour, and the captain of the ferry paints her own door green then."


@pytest.fixture
def captured(engine: FusionEngine) -> FusionEngine:
    """Return an engine whose passages have met in several orders."""
    engine.warm([A, B, C, D], bases=(FRAMED,))
    capture(engine, [[A, B, C], [D, B], [B, A, D, C]])
    return engine


@pytest.fixture
def prompt(captured: FusionEngine) -> Prompt:
    return captured.prompt(QUESTION, [D, A, C, B])


def overlap_by_hand(chunk: ChunkKV, now: list[str]) -> float:
    """Return beta' from the paper's formulas, one chunk and one pair at a time."""
    then, masses = list(context_of(chunk) or ()), fact(chunk, "inter")
    beta = sum(mass for chunk_hash, mass in zip(then, masses, strict=True) if chunk_hash in now) / sum(masses)
    common = set(then) & set(now)
    discordant = sum(
        (then.index(first) < then.index(second)) != (now.index(first) < now.index(second))
        for first, second in itertools.combinations(sorted(common), 2)
    )
    return beta * (1 - discordant / math.comb(len(common), 2)) if len(common) > 1 else beta


def overheads(engine: FusionEngine, prompt: Prompt) -> list[tuple[float, ChunkKV | None]]:
    """Return the least overhead and its cache, None for the framed cache, of all passages but the first, exact one."""
    least = []
    for index, span in enumerate(prompt.chunks):
        if index == 0:
            continue
        now = [hash_ids(before.segment.ids) for before in prompt.chunks[:index]]
        caches = [slot.chunk for slot in slots_of(engine, span.segment.text.strip())]
        rated: list[tuple[float, ChunkKV | None]] = [(min((fact(c, "cci")[0] for c in caches), default=0.5), None)]
        rated += [(fact(chunk, "cci")[0] * (1 - overlap_by_hand(chunk, now)), chunk) for chunk in caches]
        least.append(min(rated, key=lambda rating: rating[0]))
    return least


def table_of(engine: FusionEngine, prompt: Prompt, chosen: list[ChunkKV | None]) -> references.Table:
    """Compute the caches of a prompt, each behind its captured context, by the model's own forward."""
    texts = {hash_ids(ids): ids for ids in map(engine.prompts.chunk_ids, (A, B, C, D))}
    contexts = {prompt.chunks[0].start: ()}
    for span, chunk in zip(prompt.chunks[1:], chosen, strict=True):
        contexts[span.start] = () if chunk is None else context_of(chunk) or ()
    return references.stored_table(
        engine.lm, prompt, lambda span: sum((texts[name] for name in contexts[span.start]), prompt.prefix_ids)
    )


@pytest.mark.parametrize(
    ("then", "masses", "now", "expected"),
    [
        ("ab", (3.0, 1.0), "ab", 1.0),
        ("ab", (3.0, 1.0), "adb", 1.0),  # chunks in between do not count
        ("ab", (3.0, 1.0), "a", 0.75),
        ("ab", (3.0, 1.0), "b", 0.25),
        ("ab", (3.0, 1.0), "ba", 0.0),  # the only pair is reversed
        ("abc", (1.0, 1.0, 2.0), "acb", 2 / 3),
        ("abc", (1.0, 1.0, 2.0), "ca", 0.0),
        ("abc", (1.0, 1.0, 2.0), "cdb", 0.0),
        ("ab", (3.0, 1.0), "de", 0.0),
        ("ab", (0.0, 0.0), "de", 1.0),  # attended to none of them
        ("ab", (), "ab", 0.0),  # not measured
    ],
)
def test_overlap_is_attention_to_common_chunks_less_reversed_pairs(
    then: str, masses: tuple[float, ...], now: str, expected: float
) -> None:
    notes = {"context": [name * 32 for name in then], "facts": {"inter": list(masses)}}
    assert captured_overlap(replace(example_chunk(), notes=notes), [name * 32 for name in now]) == pytest.approx(
        expected
    )


def test_the_cache_with_the_least_fix_overhead_is_placed(captured: FusionEngine, prompt: Prompt) -> None:
    report = captured.prefill(prompt, method=make_method("cachecraft", early_stop=False)).report
    expected = overheads(captured, prompt)
    assert any(chunk is not None for _, chunk in expected)
    for lookup, (overhead, chunk) in zip(chunk_lookups(report)[1:], expected, strict=True):
        assert f"fix overhead {overhead:.2f}" in str(lookup.note)
        assert str(lookup.note).startswith("framed" if chunk is None else "variant-")


@pytest.mark.slow
def test_each_passage_recomputes_as_many_tokens_as_it_demands_by_stored_attention(
    captured: FusionEngine, prompt: Prompt
) -> None:
    done = captured.prefill(prompt, method=make_method("cachecraft", early_stop=False))
    chosen = []
    for span, (overhead, chunk) in zip(prompt.chunks[1:], overheads(captured, prompt), strict=True):
        count = math.ceil(overhead * len(span))
        scores = [-float(i) for i in range(len(span))] if chunk is None else chunk.blocks["inter"][:, 0].tolist()
        best = sorted(range(len(span)), key=lambda i: -scores[i])[:count]
        chosen += sorted(span.start + i for i in best)
    assert list(done.report.selected) == chosen
    assert 0 < len(chosen) < sum(len(span) for span in prompt.chunks[1:])
    assert done.report.ratio == len(chosen) / sum(len(span) for span in prompt.chunks[1:])

    table = table_of(captured, prompt, [chunk for _, chunk in overheads(captured, prompt)])
    rows = [*chosen, *range(prompt.chunks[-1].stop, len(prompt))]
    logits, completed = references.sequential_fusion(captured.lm, prompt.ids, rows, table)
    references.assert_prefilled(done, logits, completed)


def test_passages_in_their_captured_context_are_exact(family: LanguageModel) -> None:
    engine = make_warmed_engine(family, bases=(FRAMED,))
    capture(engine, [PASSAGES, [C, A]])
    prompt = engine.prompt("What else?", PASSAGES)
    done = engine.prefill(prompt, method=make_method("cachecraft"))
    assert [lookup.note for lookup in chunk_lookups(done.report)[1:]] == ["variant-0, exact"] * 2
    assert done.report.selected == ()
    logits, _ = references.plain_forward(family, prompt.ids)
    assert error(done.logits, logits[-1]) <= TOLERANCE


def test_behind_a_conversation_nothing_is_exact(captured: FusionEngine) -> None:
    prompt = captured.prompt(QUESTION, [A, B], history=[("user", "Hello."), ("assistant", "Hello.")])
    report = captured.prefill(prompt, method=make_method("cachecraft", ratio=1.0)).report
    assert len(report.selected) == sum(len(span) for span in prompt.chunks)


def test_a_passage_never_captured_starts_from_the_framed_cache(engine: FusionEngine) -> None:
    engine.warm([A, D], bases=(FRAMED,))
    prompt = engine.prompt(QUESTION, [A, D])
    report = engine.prefill(prompt, method=make_method("cachecraft", early_stop=False, alpha=0.5)).report
    span = prompt.chunks[1]
    assert chunk_lookups(report)[1].note == "framed, fix overhead 0.25"
    assert report.selected == tuple(range(span.start, span.start + math.ceil(len(span) / 4)))


def test_an_overhead_of_one_means_the_whole_passage(captured: FusionEngine, prompt: Prompt) -> None:
    method = make_method("cachecraft", alpha=10.0)
    report = captured.prefill(prompt, method=method).report
    refused = [10 * overhead >= 1 for overhead, _ in overheads(captured, prompt)]
    assert any(refused)
    assert [not lookup.hit for lookup in chunk_lookups(report)] == [False, *refused]
    assert "fix overhead 1.00: every stored cache would be recomputed whole" in str(report.fallback)
    with_ratio = captured.prefill(prompt, method=make_method("cachecraft", alpha=10.0, ratio=0.2)).report
    assert with_ratio.fallback is None, "a ratio decides what is recomputed"


def test_a_ratio_is_divided_by_demand(captured: FusionEngine, prompt: Prompt) -> None:
    report = captured.prefill(prompt, method=make_method("cachecraft", ratio=0.3)).report
    tokens = sum(len(span) for span in prompt.chunks[1:])
    assert len(report.selected) == int(0.3 * tokens)
    rated = zip(prompt.chunks[1:], overheads(captured, prompt), strict=True)
    demands = [overhead * len(span) for span, (overhead, _) in rated]
    for span, demand in zip(prompt.chunks[1:], demands, strict=True):
        count = sum(span.start <= p < span.stop for p in report.selected)
        assert abs(count - int(0.3 * tokens) * demand / sum(demands)) <= 1


def test_the_next_cache_is_placed_if_one_cannot_be_read(
    captured: FusionEngine, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = captured.prefill(prompt, method=make_method("cachecraft")).report
    get = captured.store.get

    def broken(key: ChunkKey) -> ChunkKV | Miss:
        return Miss("broken") if key.base.startswith("variant") else get(key)

    monkeypatch.setattr(captured.store, "get", broken)
    report = captured.prefill(prompt, method=make_method("cachecraft")).report
    assert all(str(lookup.note).startswith("framed") for lookup in chunk_lookups(report)[1:])
    assert best.lookups != report.lookups
    assert report.fallback is None


def test_a_slot_rewritten_since_its_lookup_is_not_placed(
    captured: FusionEngine, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = captured.store.get

    def rewritten(key: ChunkKey) -> ChunkKV | Miss:
        chunk = get(key)
        assert isinstance(chunk, ChunkKV)
        return replace(chunk, notes={"context": [hash_ids([1])]}) if key.base.startswith("variant") else chunk

    monkeypatch.setattr(captured.store, "get", rewritten)
    report = captured.prefill(prompt, method=make_method("cachecraft")).report
    assert all(str(lookup.note).startswith("framed") for lookup in chunk_lookups(report)[1:])


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.8, 0.9])
def test_recomputation_stops_in_passages_that_the_question_hardly_attends_to(
    captured: FusionEngine, prompt: Prompt, share: float
) -> None:
    lm, layer_hook = captured.lm, FocusedChunks(depth=0.4, share=share)
    method = make_method("cachecraft", early_stop=False)
    started = captured.prefill(prompt, method=method).report.selected
    done = captured.prefill(prompt, method=replace(method, layer_hook=layer_hook))

    table = table_of(captured, prompt, [chunk for _, chunk in overheads(captured, prompt)])
    passages = range(prompt.chunks[-1].stop)
    reused = [p for p in passages if p not in started]
    first = references.whole_forward(lm, prompt.ids, table, [reused] * lm.n_layers)
    question_rows = range(prompt.chunks[-1].stop, prompt.spans[-2].stop)
    attention = first.attention[:2, :, question_rows.start : question_rows.stop].mean(
        (0, 1, 2)
    )  # up to layer int(0.4 * 4)
    masses = [float(attention[span.start : span.stop].sum()) for span in prompt.chunks]
    focused = [mass >= share * max(masses) for mass in masses]
    unfocused = [span for span, is_focused in zip(prompt.chunks, focused, strict=True) if not is_focused]
    stopped = [p for p in started if any(span.start <= p < span.stop for span in unfocused)]
    assert 0 < len(stopped) < len(started), "or this test could not fail"

    assert set(done.report.selected) == set(started) - set(stopped)
    expected = references.whole_forward(lm, prompt.ids, table, [reused, reused, reused + stopped, reused + stopped])
    references.assert_prefilled(done, expected.logits, expected.table)
    question = len(prompt) - prompt.chunks[-1].stop
    assert done.report.row_layers == 4 * (question + len(started)) - 2 * len(stopped)


def test_the_cache_whose_uses_save_least_is_evicted(captured: FusionEngine) -> None:
    """Savings: uses times the share not recomputed, on average over the captured contexts, its own included."""
    slots = slots_of(captured, C)
    contexts = [slot.context for slot in slots]
    assert len(slots) == 2
    new = (contexts[0][0],)
    uses = {0: 2.0, 1: 3.0}
    worth = worth_by_savings(slots, lambda slot: uses[slot.number], new)
    for slot in slots:
        others = [list(context) for context in (*contexts, new) if context != slot.context]
        lacking = [1 - overlap_by_hand(slot.chunk, other) for other in others]
        overhead = fact(slot.chunk, "cci")[0] * sum(lacking) / 3
        assert 0 < overhead < 1
        assert worth(slot) == pytest.approx(uses[slot.number] * (1 - overhead))
        assert expected_overhead(slot.chunk, [*contexts, new]) == pytest.approx(overhead)
    assert expected_overhead(slots[0].chunk, []) == 0


def test_published_settings() -> None:
    method = make_method("cachecraft")
    assert method.adapter == ClosestVariant(alpha=1.0, slots=5, refuse=True)
    assert (method.selector, method.ratio, method.base) == (TopPerChunk(by_demand=True), None, FRAMED)
    assert method.layer_hook == FocusedChunks(depth=0.4)
    assert make_method("cachecraft", ratio=0.5).layer_hook is None
    assert make_method("cachecraft", ratio=0.5, early_stop=True).layer_hook == FocusedChunks()
    with pytest.raises(ValueError, match="must be fractions"):
        FocusedChunks(share=2.0)
