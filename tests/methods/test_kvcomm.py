"""KVCOMM: the average change by other contexts, weighted by distance; no reuse if all are equally far."""

from __future__ import annotations

import math

import pytest

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, Prompt, make_method
from qcfuse_rag.fusion.report import Lookup
from qcfuse_rag.methods.captures.slots import context_distance
from qcfuse_rag.methods.kvcomm import AnchorOffsets
from qcfuse_rag.store.key import FRAMED, hash_ids
from tests.support import references
from tests.support.captures import capture, slots_of
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES, QUESTION
from tests.support.references import error

TOLERANCE = 1e-4
OTHERS = ["Nobody rows to the island in winter.", "The mill wheel turns again; its keeper is paid by the council."]


def last(engine: FusionEngine, prompt: Prompt, **options: float) -> Lookup:
    lookups = engine.prefill(prompt, method=make_method("kvcomm", **options)).report.lookups
    return next(lookup for lookup in reversed(lookups) if lookup.role == "chunk")


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


def test_published_defaults() -> None:
    kvcomm = make_method("kvcomm")
    assert (kvcomm.base, kvcomm.ratio) == (FRAMED, 0.0)
    assert kvcomm.adapter == AnchorOffsets(gamma=0.3, temperature=1.0, anchors=20)


def test_the_difference_of_the_same_context_gives_full_prefill(family: LanguageModel) -> None:
    engine = make_engine(family, MemoryStore())
    engine.warm(PASSAGES)
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
    assert [lookup.reason for lookup in done.report.lookups if lookup.role == "chunk"] == [
        None,
        "no anchor",
        "no anchor",
    ]
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
