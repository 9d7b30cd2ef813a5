"""Captured passages equal the model's own forward pass; slots are found again by context, replaced and forgotten."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qcfuse_rag import DiskStore, FusionEngine, KVStore, LanguageModel, MemoryStore, Prompt, TenantStore
from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.ingestion.prefill import prefill_chunk
from qcfuse_rag.methods.captures import attention as statistics
from qcfuse_rag.methods.captures.job import capture_chunks
from qcfuse_rag.methods.captures.slots import (
    Slot,
    fact,
    filled_slots,
    slot_key,
    slot_to_write,
    worth_by_use,
)
from qcfuse_rag.methods.rankings import ranked
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import BLIND, FRAMED, Base, hash_ids
from qcfuse_rag.store.testing import FINGERPRINT, example_chunk
from tests.support import references
from tests.support.engines import capture, make_engine, slots_of, stored_chunk
from tests.support.passages import PASSAGES, QUESTION

TOLERANCE = 1e-4
PREFIX_IDS, IDS = (1, 2), (3, 4, 5, 6, 7)


@pytest.fixture
def prompt(engine: FusionEngine) -> Prompt:
    return engine.prompt(QUESTION, PASSAGES)


def captured(lm: LanguageModel, prompt: Prompt) -> list[ChunkKV]:
    """Capture a prompt's passages, as `Corpus.capture` does."""
    return capture_chunks(lm, prompt.prefix_ids, [span.segment.ids for span in prompt.chunks])


def statistics_by_hand(weights: Tensor, spans: list[range]) -> list[tuple[float, list[float], list[float]]]:
    """Return CCI, attention to each earlier chunk and of each token, for every chunk but the first; token by token."""
    statistics = []
    layers = len(weights)
    for i, span in enumerate(spans[1:], start=1):
        a = b = 0.0
        inter, tokens = [0.0] * i, [0.0] * len(span)
        for layer in range(layers):
            for j in range(i):
                for row in span:
                    paid = float(weights[layer, row, spans[j].start : spans[j].stop].sum())
                    inter[j] += paid / layers
                    tokens[row - span.start] += paid / layers
                    a += paid / (len(span) * len(spans[j])) / layers
            for row in span:
                b += float(weights[layer, row, span.start : row + 1].sum()) / len(span) ** 2 / layers
        statistics.append((1 / (1 + math.exp(-a / b)), inter, tokens))
    return statistics


def test_captured_passages_are_those_of_the_models_own_forward(family: LanguageModel) -> None:
    engine = make_engine(family, MemoryStore())
    prompt = engine.prompt(QUESTION, PASSAGES)
    _, table = references.plain_forward(family, prompt.ids)
    chunks = captured(family, prompt)
    assert len(chunks) == len(PASSAGES) - 1
    for span, chunk in zip(prompt.chunks[1:], chunks, strict=True):
        at = slice(span.start, span.stop)
        references.assert_chunk_is(family, chunk, [(k[:, :, at], v[:, :, at]) for k, v in table], span.start)


def test_statistics_are_those_of_the_models_own_attention(family: LanguageModel) -> None:
    if "gpt-oss" in family.name:
        pytest.skip("its attention has learned sinks, which the statistics ignore")
    if family.recurrent:
        pytest.skip("the reference knows attention alone")
    prompt = make_engine(family, MemoryStore()).prompt(QUESTION, PASSAGES)
    spans = [range(span.start, span.stop) for span in prompt.chunks]
    expected = statistics_by_hand(references.eager_attention(family, prompt.ids).mean(1), spans)
    for chunk, (impact, inter, tokens) in zip(captured(family, prompt), expected, strict=True):
        assert fact(chunk, "cci") == pytest.approx((impact,), abs=1e-5)
        assert fact(chunk, "inter") == pytest.approx(inter, rel=1e-3, abs=1e-4)
        assert chunk.blocks["inter"][:, 0].tolist() == pytest.approx(tokens, rel=1e-3, abs=1e-5)
        assert 0.5 <= impact < 1.0


def test_statistics_are_the_same_made_a_few_rows_at_a_time(
    llama: LanguageModel, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = captured(llama, prompt)
    monkeypatch.setattr(statistics, "MAX_SCORE_BYTES", 4 * 4 * len(prompt) * 7)
    for whole, blockwise in zip(at_once, captured(llama, prompt), strict=True):
        assert fact(whole, "inter") == pytest.approx(fact(blockwise, "inter"), rel=1e-5)
        assert fact(whole, "cci") == pytest.approx(fact(blockwise, "cci"), rel=1e-6)
        assert torch.allclose(whole.blocks["inter"], blockwise.blocks["inter"], atol=1e-6)


def test_neither_question_nor_conversation_changes_what_is_captured(engine: FusionEngine, llama: LanguageModel) -> None:
    plain = captured(llama, engine.prompt(QUESTION, PASSAGES))
    talked = engine.prompt("Something else?", PASSAGES, history=[("user", "My name is Ann."), ("assistant", "Hello.")])
    for expected, actual in zip(plain, captured(llama, talked), strict=True):
        for name in expected.names():
            assert torch.equal(expected.blocks[name], actual.blocks[name])


def test_tokens_are_ranked_as_in_a_prefill_behind_the_same_text(llama: LanguageModel, prompt: Prompt) -> None:
    for index, chunk in enumerate(captured(llama, prompt), start=1):
        before = tuple(token for span in prompt.chunks[:index] for token in span.segment.ids)
        prefix = prefill_chunk(llama, (*prompt.prefix_ids, *before))
        alone = prefill_chunk(llama, prompt.chunks[index].segment.ids, prefix=prefix)
        for layer in range(llama.n_layers):
            few = max(1, chunk.n_tokens // 4)
            agree = set(chunk.anchors(0.25)[layer].tolist()) & set(alone.anchors(0.25)[layer].tolist())
            assert len(agree) >= few - 1, "ties apart, the same tokens matter"
            assert sorted(chunk.blocks["ranking"][layer].tolist()) == list(range(chunk.n_tokens))


def test_one_passage_has_no_context_to_capture(engine: FusionEngine, llama: LanguageModel) -> None:
    assert captured(llama, engine.prompt(QUESTION, PASSAGES[:1])) == []
    assert captured(llama, engine.prompt(QUESTION)) == []


def test_passages_beyond_the_window_are_refused_and_up_to_it_are_not(llama: LanguageModel) -> None:
    most = llama.context_window.tokens
    prefix_ids, first = (5,) * 10, (6,) * 100
    [last] = capture_chunks(llama, prefix_ids, [first, (7,) * (most - 110)])
    assert isinstance(last, ChunkKV)
    assert last.n_tokens == most - 110, (
        "without an instruction, for which there is no room, its tokens rank as they are"
    )
    with pytest.raises(PromptTooLong, match="capture fewer passages at once"):
        capture_chunks(llama, prefix_ids, [first, (7,) * (most - 109)])


def context(*numbers: int) -> tuple[str, ...]:
    return tuple(hash_ids([number]) for number in numbers)


def slot(number: int, *neighbours: int, turn: float = 0.0) -> Slot:
    chunk = replace(example_chunk(number), notes={"context": list(context(*neighbours)), "facts": {"turn": [turn]}})
    return Slot(number, slot_key("variant", number, FINGERPRINT, PREFIX_IDS, IDS), chunk, context(*neighbours))


def test_what_is_there_is_found_whatever_gaps_there_are_and_is_not_used_by_that() -> None:
    store = MemoryStore()
    for number in (0, 2, 4):
        store.put(slot_key("variant", number, FINGERPRINT, PREFIX_IDS, IDS), slot(number, number).chunk)
    found = filled_slots(store, "variant", 4, FINGERPRINT, PREFIX_IDS, hash_ids(IDS), len(IDS))
    assert [(slot.number, slot.context) for slot in found] == [(0, context(0)), (2, context(2))]
    assert store.stats()[0].hits == store.stats()[0].misses == 0
    assert filled_slots(store, "difference", 4, FINGERPRINT, PREFIX_IDS, hash_ids(IDS), len(IDS)) == []


def test_what_says_no_context_or_is_of_another_length_is_passed_over() -> None:
    store = MemoryStore()
    store.put(slot_key("variant", 0, FINGERPRINT, PREFIX_IDS, IDS), example_chunk())
    longer = replace(example_chunk(n_tokens=6), notes={"context": []})
    store.put(slot_key("variant", 1, FINGERPRINT, PREFIX_IDS, IDS), longer)
    assert filled_slots(store, "variant", 5, FINGERPRINT, PREFIX_IDS, hash_ids(IDS), len(IDS)) == []


def test_looking_reads_headers_only(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    key = slot_key("variant", 0, FINGERPRINT, PREFIX_IDS, IDS)
    store.put(key, slot(0, 1).chunk)
    path = store.files.path(key.address)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    assert [
        slot.number for slot in filled_slots(store, "variant", 5, FINGERPRINT, PREFIX_IDS, hash_ids(IDS), len(IDS))
    ] == [0]


def test_the_same_context_has_the_same_slot_then_comes_a_free_one_then_the_one_worth_least() -> None:
    def worth(slot: Slot) -> float:
        return {0: 3.0, 1: 1.0, 2: 2.0}[slot.number]

    three = [slot(0, 7), slot(1, 7, 8), slot(2, 8, 7)]
    assert slot_to_write(three, context(8, 7), 3, worth) == 2
    assert slot_to_write(three, context(9), 4, worth) == 3
    assert slot_to_write([three[0], three[2]], context(9), 3, worth) == 1
    assert slot_to_write(three, context(9), 3, worth) == 1
    assert slot_to_write([], context(9), 3, worth) == 0


def test_the_least_used_of_the_five_oldest_gives_way() -> None:
    found = [slot(number, number, turn=10.0 - number) for number in range(7)]  # 6 is the oldest, 0 the newest
    uses = {0: 0.0, 1: 0.0, 2: 5.0, 3: 4.0, 4: 1.0, 5: 3.0, 6: 2.0}
    assert slot_to_write(found, context(99), 7, worth_by_use(found, lambda slot: uses[slot.number])) == 4


def test_captured_groups_are_found_again_as_they_were_born(engine: FusionEngine, llama: LanguageModel) -> None:
    summary = capture(engine, [PASSAGES, [PASSAGES[2], PASSAGES[1]], PASSAGES[:1], []])
    assert (summary.groups, summary.captured, summary.present, summary.failed) == (4, 3, 0, ())
    first, other = slots_of(engine, PASSAGES[1])
    hashes = [hash_ids(engine.prompts.chunk_ids(text)) for text in PASSAGES]
    assert (first.context, other.context) == ((hashes[0],), (hashes[2],))
    assert (first.turn, other.turn) == (0.0, 1.0)
    prompt = engine.prompt(QUESTION, PASSAGES)
    expected = capture_chunks(llama, prompt.prefix_ids, [span.segment.ids for span in prompt.chunks])[0]
    for name in expected.names():
        assert torch.equal(first.chunk.blocks[name], expected.blocks[name])
    assert slots_of(engine, PASSAGES[0]) == [], "the first of a group was prefilled behind the system prefix alone"
    assert summary.size_bytes == sum(entry.size_bytes for entry in engine.store.entries())


def test_what_is_kept_already_is_not_computed_again(engine: FusionEngine) -> None:
    capture(engine, [PASSAGES])
    again = capture(engine, [PASSAGES, PASSAGES[:2]])
    assert (again.captured, again.present, again.tokens) == (0, 3, 0)
    with_patches = capture(engine, [PASSAGES], keep=("variant", "patch"))
    assert (with_patches.captured, with_patches.present) == (2, 2)
    assert capture(engine, [PASSAGES], keep=("patch",), rank=16).captured == 2, "of another rank"


def test_no_more_contexts_are_kept_than_there_are_slots_and_the_used_ones_stay(engine: FusionEngine) -> None:
    capture(engine, [[PASSAGES[0], PASSAGES[2]], [PASSAGES[1], PASSAGES[2]]], variants=2)
    oldest, _ = slots_of(engine, PASSAGES[2])
    engine.store.get(oldest.key)
    capture(engine, [PASSAGES], variants=2)
    kept, newest = slots_of(engine, PASSAGES[2])
    assert kept.context == oldest.context
    assert len(newest.context) == 2
    assert newest.turn == 2.0


def test_differences_and_patches_are_to_the_framed_cache_which_is_warmed(engine: FusionEngine) -> None:
    capture(engine, [PASSAGES], keep=("variant", "difference", "patch"), rank=64)
    framed = stored_chunk(engine, PASSAGES[2])
    [captured] = slots_of(engine, PASSAGES[2])
    for kind, kv_dtype in (("difference", "model"), ("patch", "rank64")):
        [kept] = slots_of(engine, PASSAGES[2], kind)  # type: ignore[arg-type]
        assert (kept.chunk.kv_dtype, kept.context, kept.chunk.extras) == (kv_dtype, captured.context, ("inter",))
        assert fact(kept.chunk, "cci") == fact(captured.chunk, "cci")
        for layer in range(engine.lm.n_layers):
            for own, other, whole in zip(
                framed.layer(layer), kept.chunk.layer(layer), captured.chunk.layer(layer), strict=True
            ):
                assert torch.allclose(own + other, whole, atol=1e-4)


def test_a_group_beyond_the_window_is_told_of_and_the_others_are_captured(engine: FusionEngine) -> None:
    summary = capture(engine, [[PASSAGES[0] * 20, PASSAGES[1] * 20], PASSAGES[:2]])
    assert summary.captured == 1
    [(index, reason)] = summary.failed
    assert index == 0
    assert "capture fewer passages at once" in reason


def test_no_difference_is_kept_where_there_is_no_room_for_what_it_is_to(llama: LanguageModel) -> None:
    class Forgetful(MemoryStore):
        def get(self, key: object) -> object:  # type: ignore[override]
            from qcfuse_rag.store.backends.base import Miss

            return Miss("absent")

    engine = make_engine(llama, Forgetful())
    summary = capture(engine, [PASSAGES[:2]], keep=("patch",))
    assert summary.captured == 0
    assert "no difference to it can" in summary.failed[0][1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"keep": ()}, "cannot keep nothing; there are variant, difference, patch"),
        ({"keep": ("fused",)}, "cannot keep fused"),
        ({"keep": ("patch",), "rank": 5}, "no format of rank 5"),
        ({"variants": 0}, "a passage needs a slot, got 0"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(engine: FusionEngine, wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        capture(engine, [PASSAGES], **wrong)  # type: ignore[arg-type]


def test_tenants_have_slots_of_their_own(llama: LanguageModel) -> None:
    shared: KVStore = MemoryStore()
    first, other = (make_engine(llama, TenantStore(shared, name, bytes(16))) for name in ("one", "other"))
    capture(first, [PASSAGES])
    assert len(slots_of(first, PASSAGES[1])) == 1
    assert slots_of(other, PASSAGES[1]) == []


@pytest.mark.parametrize("base", [FRAMED, ranked(BLIND, "kvzip")], ids=lambda base: base.name)
def test_a_forgotten_document_takes_along_what_was_born_behind_its_passages(engine: FusionEngine, base: Base) -> None:
    engine.warm(PASSAGES, bases=[base], sources=["ferry", "paint", "mill"])
    capture(engine, [PASSAGES, PASSAGES[1:]], keep=("variant", "patch"))
    assert [len(slots_of(engine, text)) for text in PASSAGES] == [0, 1, 2]
    engine.forget("ferry")
    assert slots_of(engine, PASSAGES[1]) == slots_of(engine, PASSAGES[1], "patch") == []
    [left] = slots_of(engine, PASSAGES[2])
    assert left.context == (hash_ids(engine.prompts.chunk_ids(PASSAGES[1])),)
    engine.forget("mill")
    assert slots_of(engine, PASSAGES[2]) == slots_of(engine, PASSAGES[2], "patch") == []


def test_a_passage_that_another_document_has_too_keeps_what_was_born_behind_it(engine: FusionEngine) -> None:
    engine.warm([*PASSAGES, PASSAGES[0]], sources=["ferry", "paint", "mill", "copy"])
    capture(engine, [PASSAGES])
    engine.forget("ferry")
    assert len(slots_of(engine, PASSAGES[1])) == 1
    engine.forget("copy")
    assert slots_of(engine, PASSAGES[1]) == []


def test_a_passage_warmed_only_to_differ_from_it_goes_with_its_document(engine: FusionEngine) -> None:
    engine.warm(PASSAGES, bases=[BLIND], sources=["ferry", "paint", "mill"])
    capture(engine, [PASSAGES], keep=("patch",))
    framed = FRAMED.key(engine.lm.fingerprint, engine.prompts.prefix_ids, engine.prompts.chunk_ids(PASSAGES[2]))
    assert framed in engine.store
    engine.forget("mill")
    assert framed not in engine.store
    assert len(slots_of(engine, PASSAGES[1], "patch")) == 1


def test_a_slot_written_anew_goes_with_its_new_context_and_not_with_the_old(engine: FusionEngine) -> None:
    engine.warm(PASSAGES, sources=["ferry", "paint", "mill"])
    capture(engine, [[PASSAGES[0], PASSAGES[2]]], variants=1)
    capture(engine, [[PASSAGES[1], PASSAGES[2]]], variants=1)
    engine.forget("ferry")
    assert len(slots_of(engine, PASSAGES[2])) == 1
    engine.forget("paint")
    assert slots_of(engine, PASSAGES[2]) == []


def test_what_was_forgotten_can_be_captured_again(engine: FusionEngine) -> None:
    for _ in range(2):
        engine.warm(PASSAGES, sources=["ferry", "paint", "mill"])
        assert capture(engine, [PASSAGES]).captured == 2
        engine.forget("ferry")
    assert engine.corpus.open_sources().garbage.collect() == 0


def test_a_fault_in_a_capture_is_raised_and_is_no_reason_of_a_group(
    engine: FusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*_: object) -> None:
        raise KeyError("layer")

    monkeypatch.setattr("qcfuse_rag.methods.captures.job.capture_chunks", faulty)
    with pytest.raises(KeyError, match="layer"):
        capture(engine, [PASSAGES])
