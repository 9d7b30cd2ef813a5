"""Kamera and KVCOMM: what other contexts changed is added in the context it was captured in, or on average."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from qcfuse_rag import FusionEngine, LanguageModel, Prompt, make_method
from qcfuse_rag.fusion.report import Lookup
from qcfuse_rag.methods.captures.slots import (
    Slot,
    add_differences,
    attention_mass,
    context_distance,
    context_overlap,
    kendall_distance,
    slot_key,
)
from qcfuse_rag.methods.kamera import StoredPatches
from qcfuse_rag.methods.kvcomm import AnchorOffsets
from qcfuse_rag.store.chunk import to_format
from qcfuse_rag.store.key import FRAMED, hash_ids
from qcfuse_rag.store.testing import FINGERPRINT, example_chunk
from tests.support import references
from tests.support.engines import capture, chunk_lookups, damaged, make_warmed_engine, slots_of
from tests.support.passages import PASSAGES, QUESTION
from tests.support.references import error

TOLERANCE = 1e-4
A, B, C, D = (hash_ids([number]) for number in range(4))


def slot(context: tuple[str, ...], inter: tuple[float, ...] = ()) -> Slot:
    chunk = replace(example_chunk(), notes={"context": list(context), "facts": {"inter": list(inter)}})
    return Slot(0, slot_key("patch", 0, FINGERPRINT, (1,), (2,)), chunk, context)


def notes(engine: FusionEngine, prompt: Prompt) -> list[str | None]:
    report = engine.prefill(prompt, method=make_method("kamera")).report
    return [lookup.note for lookup in chunk_lookups(report)]


def test_published_defaults() -> None:
    kamera = make_method("kamera")
    assert (kamera.base, kamera.ratio, kamera.adapter) == (FRAMED, 0.0, StoredPatches(threshold=0.5))
    kvcomm = make_method("kvcomm")
    assert (kvcomm.base, kvcomm.ratio) == (FRAMED, 0.0)
    assert kvcomm.adapter == AnchorOffsets(gamma=0.3, temperature=1.0, anchors=20)


# Comparing contexts.


def test_overlap_is_the_share_of_attention_to_chunks_that_are_in_both_contexts() -> None:
    captured = slot((A, B, C), (6.0, 3.0, 1.0))
    assert context_overlap(captured, (A, B, C)) == 1.0
    assert context_overlap(captured, (D, B)) == pytest.approx(0.3)
    assert context_overlap(captured, (C, A)) == pytest.approx(0.7)
    assert context_overlap(captured, ()) == 0.0
    assert context_overlap(slot(()), (A,)) == 1.0


def test_without_measured_attention_all_chunks_of_a_context_have_equal_weight() -> None:
    assert attention_mass(slot((A, B))) == (2.5, 2.5), "the five tokens of the chunk, divided equally"
    assert context_overlap(slot((A, B)), (B,)) == 0.5
    assert context_overlap(slot((A, B), (0.0, 0.0)), (B,)) == 0.5


def test_discordance_is_the_share_of_pairs_in_reverse_order() -> None:
    assert kendall_distance((A, B, C), (A, B, C)) == 0.0
    assert kendall_distance((A, B, C), (C, B, A)) == 1.0
    assert kendall_distance((A, B, C), (B, A, D, C)) == pytest.approx(1 / 3)
    assert kendall_distance((A, B), (B, D)) == 0.0


def test_distance_counts_missing_new_and_reordered_chunks() -> None:
    captured = slot((A, B, C), (6.0, 3.0, 0.6))
    assert context_distance(captured, (A, B, C)) == 0.0
    assert context_distance(captured, (A, B)) == pytest.approx(0.6)
    assert context_distance(captured, (A, B, C, D)) == pytest.approx(3.2)
    assert context_distance(captured, (A, D, C)) == pytest.approx(3.0 + 3.2)
    assert context_distance(captured, (B, A)) == pytest.approx(0.6 + 9.0)


# Sums.


def test_a_sum_equals_the_sum_of_its_parts_whole_and_in_ranges_in_every_number_format() -> None:
    for kv_dtype in ("model", "int8"):
        chunk = to_format(example_chunk(1, n_tokens=30), kv_dtype)
        patch = to_format(example_chunk(2, n_tokens=30), "rank4")
        total = add_differences(chunk, [(0.25, patch), (2.0, example_chunk(3, n_tokens=30))], first_layer=1)
        assert total.kv_dtype == "model"
        assert total.names() == example_chunk().names()
        assert torch.equal(total.blocks["ranking"], chunk.blocks["ranking"])
        for layer in range(3):
            parts = zip(chunk.layer(layer), patch.layer(layer), example_chunk(3, n_tokens=30).layer(layer), strict=True)
            expected = [base + (0.25 * low + 2.0 * high if layer else 0.0) for base, low, high in parts]
            for whole, part, sum_ in zip(total.layer(layer), total.layer(layer, 7, 12), expected, strict=True):
                assert torch.allclose(whole, sum_, atol=1e-6)
                assert torch.allclose(part, sum_[:, 7:12], atol=1e-6)


# Patching.


def test_a_patch_of_full_rank_in_its_own_context_is_full_prefill(family: LanguageModel) -> None:
    engine = make_warmed_engine(family)
    capture(engine, [PASSAGES], keep=("patch",), rank=64)
    prompt = engine.prompt(QUESTION, PASSAGES)
    logits, table = references.plain_forward(family, prompt.ids)
    done = engine.prefill(prompt, method=make_method("kamera"))
    assert done.report.reused_tokens == prompt.chunks[-1].stop
    references.assert_prefilled(done, logits[-1], table)
    plain = engine.prefill(prompt, method=make_method("reuse"))
    assert error(plain.logits, logits[-1]) > 100 * TOLERANCE, "patches must matter here, or this test could not fail"


def test_a_patch_is_the_truncated_singular_value_decomposition_of_the_context_difference(
    engine: FusionEngine,
) -> None:
    capture(engine, [PASSAGES], keep=("patch",), rank=4)
    engine.warm(PASSAGES)
    prompt = engine.prompt(QUESTION, PASSAGES)
    done = engine.prefill(prompt, method=make_method("kamera"))
    _, exact = references.plain_forward(engine.lm, prompt.ids)
    framed = references.stored_table(engine.lm, prompt, FRAMED)
    for span in prompt.chunks[1:]:
        tokens = slice(span.start, span.stop)
        for layer in range(engine.lm.n_layers):
            captured, canonical = (
                table[layer][1][0, :, tokens].transpose(0, 1).flatten(1) for table in (exact, framed)
            )
            left, singular, right = np.linalg.svd((captured - canonical).double().numpy(), full_matrices=False)
            low = torch.from_numpy(left[:, :4] * singular[:4] @ right[:4]).float()
            placed = done.buffer.values[layer][0, :, tokens].transpose(0, 1).flatten(1)
            assert error(placed, canonical + low) <= TOLERANCE
            assert layer == 0 or error(placed, captured) > TOLERANCE


def test_a_patch_of_another_context_is_not_added(engine: FusionEngine) -> None:
    engine.warm([*PASSAGES, "Something else."])
    capture(engine, [PASSAGES[:2]], keep=("patch",))
    stale = engine.prompt(QUESTION, ["Something else.", PASSAGES[1]])
    assert notes(engine, stale) == [None, "no patch fits, best overlap 0.00"]
    patched, plain = (engine.prefill(stale, method=make_method(name)) for name in ("kamera", "reuse"))
    assert torch.equal(patched.logits, plain.logits)
    assert notes(engine, engine.prompt(QUESTION, PASSAGES[:2])) == [None, "patch-0, overlap 1.00"]


def test_the_threshold_is_the_least_overlap_of_contexts(engine: FusionEngine) -> None:
    engine.warm(PASSAGES)
    capture(engine, [PASSAGES], keep=("patch",))
    [patch] = slots_of(engine, PASSAGES[2], "patch")
    prompt = engine.prompt(QUESTION, PASSAGES[1:])
    share = context_overlap(patch, (hash_ids(engine.prompts.chunk_ids(PASSAGES[1])),))
    assert 0.0 < share < 1.0
    for threshold, added in ((share - 0.01, True), (share + 0.01, False)):
        report = engine.prefill(prompt, method=make_method("kamera", threshold=threshold)).report
        assert ("patch-0" in (report.lookups[-1].note or "")) == added


def test_ties_go_to_the_patch_whose_context_differs_in_the_fewest_chunks(engine: FusionEngine) -> None:
    engine.warm(PASSAGES)
    capture(
        engine,
        [[PASSAGES[0], PASSAGES[2]], PASSAGES, [PASSAGES[1], PASSAGES[0], PASSAGES[2]]],
        keep=("patch",),
    )
    assert notes(engine, engine.prompt(QUESTION, PASSAGES))[-1] == "patch-1, overlap 1.00"
    assert notes(engine, engine.prompt(QUESTION, [PASSAGES[0], PASSAGES[2]]))[-1] == "patch-0, overlap 1.00"
    reordered = engine.prompt(QUESTION, [PASSAGES[1], PASSAGES[0], PASSAGES[2]])
    assert notes(engine, reordered)[-1] == "patch-2, overlap 1.00"


def test_no_patch_applies_behind_a_conversation(engine: FusionEngine) -> None:
    engine.warm(PASSAGES)
    capture(engine, [PASSAGES], keep=("patch",))
    prompt = engine.prompt(QUESTION, PASSAGES, history=[("user", "Hello."), ("assistant", "Hello.")])
    assert notes(engine, prompt) == ["no patch applies, since text other than passages precedes the chunk"] * 3


def test_a_damaged_patch_is_discarded_and_the_cache_is_used_without_it(engine: FusionEngine) -> None:
    engine.warm(PASSAGES)
    capture(engine, [PASSAGES[:2]], keep=("patch",))
    [patch] = slots_of(engine, PASSAGES[1], "patch")
    engine.store._entries[patch.key.address].chunk = damaged(patch.chunk)  # type: ignore[attr-defined]
    prompt = engine.prompt(QUESTION, PASSAGES[:2])
    patched, plain = (engine.prefill(prompt, method=make_method(name)) for name in ("kamera", "reuse"))
    assert torch.equal(patched.logits, plain.logits)
    assert patched.report.fallback is None
    assert patch.key not in engine.store


# KVCOMM: the average change by other contexts, weighted by distance; no reuse if all are equally far.


OTHERS = ["Nobody rows to the island in winter.", "The mill wheel turns again; its keeper is paid by the council."]


def last(engine: FusionEngine, prompt: Prompt, **options: float) -> Lookup:
    return chunk_lookups(engine.prefill(prompt, method=make_method("kvcomm", **options)).report)[-1]


@pytest.fixture
def two_anchors(engine: FusionEngine) -> FusionEngine:
    """Return an engine whose last passage was captured twice, each time behind one other passage."""
    engine.warm([*PASSAGES, *OTHERS])
    capture(
        engine,
        [[OTHERS[0], PASSAGES[2]], [PASSAGES[0], PASSAGES[2]]],
        keep=("difference",),
        variants=20,
    )
    return engine


def test_the_difference_of_the_same_context_gives_full_prefill(family: LanguageModel) -> None:
    engine = make_warmed_engine(family)
    capture(engine, [PASSAGES, [PASSAGES[0], PASSAGES[2]]], keep=("difference",))
    prompt = engine.prompt(QUESTION, PASSAGES)
    logits, table = references.plain_forward(family, prompt.ids)
    done = engine.prefill(prompt, method=make_method("kvcomm"))
    assert done.report.reused_tokens == prompt.chunks[-1].stop
    references.assert_prefilled(done, logits[-1], table)


def test_without_an_anchor_a_passage_is_computed_in_full(engine: FusionEngine) -> None:
    engine.warm(PASSAGES)
    prompt = engine.prompt(QUESTION, PASSAGES)
    done = engine.prefill(prompt, method=make_method("kvcomm"))
    assert [lookup.reason for lookup in chunk_lookups(done.report)] == [None, "no anchor", "no anchor"]
    logits, _ = references.plain_forward(engine.lm, prompt.ids)
    assert error(done.logits, logits[-1]) <= TOLERANCE


def test_a_single_anchor_is_added_in_any_context(engine: FusionEngine) -> None:
    engine.warm(PASSAGES)
    capture(engine, [[PASSAGES[0], PASSAGES[2]]], keep=("difference",))
    prompt = engine.prompt(QUESTION, PASSAGES[1:])
    assert last(engine, prompt).note == "1 of 1 anchors, entropy 0.00 bits"


def test_an_average_weighs_anchors_by_the_distance_of_their_contexts(two_anchors: FusionEngine) -> None:
    """The reference takes differences from the model's own forward; values do not depend on the position."""
    engine = two_anchors
    prompt = engine.prompt(QUESTION, [PASSAGES[0], OTHERS[1], PASSAGES[2]])
    now = tuple(hash_ids(span.segment.ids) for span in prompt.chunks[:2])
    distances = [context_distance(anchor, now) for anchor in slots_of(engine, PASSAGES[2], "difference")]
    factors = [math.exp(-distance / 15) for distance in distances]
    weights = [factor / sum(factors) for factor in factors]
    assert weights[1] > weights[0] > 0.1, "both must matter here"
    done = engine.prefill(prompt, method=make_method("kvcomm", gamma=1.0, temperature=15.0))
    framed = references.stored_table(engine.lm, prompt, FRAMED)
    span = prompt.chunks[2]
    for layer in range(engine.lm.n_layers):
        canonical = framed[layer][1][:, :, span.start : span.stop]
        expected = canonical.clone()
        for weight, before in zip(weights, (OTHERS[0], PASSAGES[0]), strict=True):
            captured = engine.prompt(QUESTION, [before, PASSAGES[2]])
            _, table = references.plain_forward(engine.lm, captured.ids)
            expected += weight * (table[layer][1][:, :, captured.chunks[1].start : captured.chunks[1].stop] - canonical)
        assert error(done.buffer.values[layer][:, :, span.start : span.stop], expected) <= TOLERANCE


def test_a_passage_is_computed_if_its_anchors_are_equally_far(two_anchors: FusionEngine) -> None:
    prompt = two_anchors.prompt(QUESTION, [OTHERS[1], PASSAGES[2]])
    now = (hash_ids(prompt.chunks[0].segment.ids),)
    distances = [context_distance(anchor, now) for anchor in slots_of(two_anchors, PASSAGES[2], "difference")]
    first = 1 / (1 + math.exp((distances[0] - distances[1]) / 50))
    entropy = -sum(p * math.log2(p) for p in (first, 1 - first))
    strict, lax = (
        last(two_anchors, prompt, gamma=gamma, temperature=50.0) for gamma in (entropy - 0.01, entropy + 0.01)
    )
    assert strict.reason == f"anchors disagree: entropy {entropy:.2f} of 1.00 bits"
    assert not strict.hit
    assert lax.hit
    assert lax.note == f"2 of 2 anchors, entropy {entropy:.2f} bits"


def test_anchors_with_negligible_weight_are_not_read(two_anchors: FusionEngine) -> None:
    prompt = two_anchors.prompt(QUESTION, [PASSAGES[0], OTHERS[1], PASSAGES[2]])
    two_anchors.prefill(prompt, method=make_method("kvcomm", gamma=1.0, temperature=0.05))
    uses = {entry.address: entry.uses or 0.0 for entry in two_anchors.store.entries()}
    far, near = (uses[anchor.key.address] for anchor in slots_of(two_anchors, PASSAGES[2], "difference"))
    assert near > far


def test_a_passage_behind_a_conversation_is_computed(two_anchors: FusionEngine) -> None:
    prompt = two_anchors.prompt(QUESTION, PASSAGES[2:], history=[("user", "Hello."), ("assistant", "Hello.")])
    assert last(two_anchors, prompt).reason == "no anchor applies, since text other than passages precedes the chunk"
