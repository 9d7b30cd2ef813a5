"""Kamera: a patch is added in the context it was captured in, and in no other context."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, Prompt, make_method
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
from qcfuse_rag.store.chunk import to_format
from qcfuse_rag.store.key import FRAMED, hash_ids
from qcfuse_rag.store.testing import FINGERPRINT, example_chunk
from tests.support import references
from tests.support.captures import capture, slots_of
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES, QUESTION
from tests.support.references import error

TOLERANCE = 1e-4
A, B, C, D = (hash_ids([number]) for number in range(4))


def slot(context: tuple[str, ...], inter: tuple[float, ...] = ()) -> Slot:
    chunk = replace(example_chunk(), notes={"context": list(context), "facts": {"inter": list(inter)}})
    return Slot(0, slot_key("patch", 0, FINGERPRINT, (1,), (2,)), chunk, context)


def notes(engine: FusionEngine, prompt: Prompt) -> list[str | None]:
    report = engine.prefill(prompt, method=make_method("kamera")).report
    return [lookup.note for lookup in report.lookups if lookup.role == "chunk"]


def test_published_defaults() -> None:
    kamera = make_method("kamera")
    assert (kamera.base, kamera.ratio, kamera.adapter) == (FRAMED, 0.0, StoredPatches(threshold=0.5))


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
    engine = make_engine(family, MemoryStore())
    engine.warm(PASSAGES)
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
    from qcfuse_rag.errors import CorruptEntry
    from qcfuse_rag.store.chunk import Blocks, TensorBlocks

    class Damaged(TensorBlocks):
        def __getitem__(self, name: str) -> Tensor:
            raise CorruptEntry(f"checksum of block {name} differs")

    engine.warm(PASSAGES)
    capture(engine, [PASSAGES[:2]], keep=("patch",))
    [patch] = slots_of(engine, PASSAGES[1], "patch")
    blocks: Blocks = Damaged({})
    engine.store._entries[patch.key.address].chunk = replace(patch.chunk, blocks=blocks)  # type: ignore[attr-defined]
    prompt = engine.prompt(QUESTION, PASSAGES[:2])
    patched, plain = (engine.prefill(prompt, method=make_method(name)) for name in ("kamera", "reuse"))
    assert torch.equal(patched.logits, plain.logits)
    assert patched.report.fallback is None
    assert patch.key not in engine.store
