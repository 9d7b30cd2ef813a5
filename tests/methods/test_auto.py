"""`auto`: its parts, each of which can be switched off; without its guard answers do not depend on earlier requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, make_method
from qcfuse_rag.fusion.probes import NamedLayers, QuestionProbe
from qcfuse_rag.fusion.selectors import candidate_positions, recomputable_chunks
from qcfuse_rag.ingestion.prefill import PrefillTarget
from qcfuse_rag.ingestion.primer import PRIMER, PRIMER_TOKENS, primer_ids
from qcfuse_rag.ingestion.warm_job import WarmJob
from qcfuse_rag.store.key import FRAMED, PRIMED
from tests.support import references
from tests.support.engines import make_warmed_engine, placed, stored_chunk
from tests.support.passages import PASSAGES, QUESTION

UNGUARDED, REUSE = make_method("auto", ratio=0.2, guard=False), make_method("reuse", base=FRAMED)


@pytest.fixture
def warmed(llama: LanguageModel) -> FusionEngine:
    return make_warmed_engine(llama, method=UNGUARDED)


# --- primed caches


def test_a_primed_chunk_is_prefilled_behind_system_prefix_and_primer(warmed: FusionEngine) -> None:
    prefix_ids = warmed.prompts.prefix_ids
    primer = primer_ids([warmed.prompts.chunk_ids(passage) for passage in PRIMER], warmed.lm.context_window.tokens)
    ids = warmed.prompts.chunk_ids(PASSAGES[1])
    expected = references.alone_at(warmed.lm, ids, len(prefix_ids) + len(primer), before=prefix_ids + primer)
    references.assert_chunk_is(
        warmed.lm, stored_chunk(warmed, PASSAGES[1], PRIMED), expected, len(prefix_ids) + len(primer)
    )


def test_a_primed_chunk_does_not_depend_on_other_entries(llama: LanguageModel, warmed: FusionEngine) -> None:
    alone = make_warmed_engine(llama, method=UNGUARDED, texts=PASSAGES[2:])
    first, second = (stored_chunk(engine, PASSAGES[2], PRIMED) for engine in (alone, warmed))
    references.assert_same_layers(first, second, 1e-5)


def test_the_primer_is_computed_once_for_all_jobs(llama: LanguageModel) -> None:
    engine, rows = FusionEngine(llama, MemoryStore(), method=UNGUARDED), []
    embeddings = llama.model.get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].numel()))
    try:
        computed = []
        for text in PASSAGES[:2]:
            rows.clear()
            engine.warm([text])
            computed.append(sum(rows) - 2 * len(engine.prompts.chunk_ids(text)))
    finally:
        hook.remove()
    primer = primer_ids([engine.prompts.chunk_ids(passage) for passage in PRIMER], llama.context_window.tokens)
    assert computed[0] >= computed[1] + len(primer), "beside the passages themselves"


def test_warming_for_auto_keeps_both_caches_it_reads(llama: LanguageModel) -> None:
    engine = FusionEngine(llama, MemoryStore(), method=UNGUARDED)
    assert engine.corpus.bases == (PRIMED, FRAMED)
    assert engine.warm(PASSAGES).warmed == 2 * len(PASSAGES)


def test_a_primed_base_needs_its_primer(llama: LanguageModel, engine: FusionEngine) -> None:
    ids = [engine.prompts.chunk_ids(PASSAGES[0])]
    with pytest.raises(ValueError, match="needs the token ids of a primer"):
        WarmJob(PrefillTarget(llama, engine.store, engine.prompts.prefix_ids), ids, bases=(PRIMED,))


def test_a_primer_is_the_last_passages_that_fit() -> None:
    passages = [(1,) * 300, (2,) * 400, (3,) * 500]
    assert primer_ids(passages, 1_000_000) == (2,) * 400 + (3,) * 500
    assert len(primer_ids(passages, 1_000_000)) <= PRIMER_TOKENS
    assert primer_ids(passages, 4 * 600) == (3,) * 500
    assert primer_ids(passages, 4 * 100) == (3,) * 100


def test_the_whole_primer_fits_common_tokenizers_and_has_no_digits() -> None:
    passages = [tuple(range(len(passage) // 4)) for passage in PRIMER]  # four characters a token, as usual in English
    assert len(primer_ids(passages, 4096)) == sum(map(len, passages))
    assert not any(character.isdigit() for passage in PRIMER for character in passage)


def test_caches_behind_another_primer_have_other_keys(engine: FusionEngine) -> None:
    prefix_ids = engine.prompts.prefix_ids
    keys = {
        replace(PRIMED, revision=revision).key(engine.lm.fingerprint, prefix_ids, (1, 2, 3)) for revision in (1, 2, 3)
    }
    assert len({key.address for key in keys}) == 3
    assert {key.base for key in keys} == {"primed"}


# --- exact first


def test_the_first_passage_is_exact_and_the_others_primed(warmed: FusionEngine) -> None:
    prompt = warmed.prompt(QUESTION, PASSAGES)
    for method, exact in ((UNGUARDED, [True, False, False]), (make_method("auto", exact_first=False), [False] * 3)):
        assert [chunk.exact for chunk in placed(warmed, prompt, method).placed_chunks] == exact


def test_one_passage_is_answered_as_full_prefill_would(warmed: FusionEngine) -> None:
    prompt = warmed.prompt(QUESTION, PASSAGES[:1])
    full = warmed.prefill(prompt, method=make_method("full"))
    assert torch.allclose(warmed.prefill(prompt).logits, full.logits, atol=1e-4)


def test_a_passage_not_primed_yet_is_taken_framed_and_one_not_stored_is_computed(llama: LanguageModel) -> None:
    engine = make_warmed_engine(llama, method=UNGUARDED, texts=PASSAGES[:2], bases=(FRAMED,))
    report = engine.prefill(engine.prompt(QUESTION, PASSAGES)).report
    assert [lookup.note for lookup in report.lookups[1:]] == [None, "framed instead of primed", None]
    assert [lookup.hit for lookup in report.lookups[1:]] == [True, True, False]


# --- the probe


@pytest.mark.parametrize("rows", ["question", "suffix"])
def test_the_probe_runs_the_question_or_the_suffix(warmed: FusionEngine, rows: str) -> None:
    prompt = warmed.prompt(QUESTION, PASSAGES)
    probe_rows = placed(warmed, prompt, REUSE).probe_rows(suffix=rows == "suffix").tolist()
    assert probe_rows[0] == prompt.chunks[-1].stop
    last = next(span.stop for span in prompt.spans if span.segment.role.value == "question")
    assert probe_rows[-1] + 1 == (len(prompt) if rows == "suffix" else last)


@pytest.mark.parametrize(
    ("layers", "n_layers", "expected"),
    [
        ("upper", 4, (2, 3)),
        ("third_quarter", 4, (2,)),
        *[("third_quarter", count, layers) for count, layers in ((1, (0,)), (2, (1,)), (3, (1,)), (24, range(12, 18)))],
        ("last", 24, (23,)),
    ],
)
def test_layers_of_a_probe_by_name(
    layers: NamedLayers, n_layers: int, expected: Sequence[int], llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LanguageModel, "n_layers", n_layers)
    probe = QuestionProbe(layers=layers)
    assert probe.layers_of(llama) == tuple(expected)
    assert probe.depth(llama) == max(expected) + 1


def test_normalized_layers_weigh_the_same(warmed: FusionEngine) -> None:
    """By hand: each layer's attention to the candidates, over its sum."""
    prompt = warmed.prompt(QUESTION, PASSAGES)
    scores = {}
    for normalized in (False, True):
        fused = placed(warmed, prompt, REUSE)
        scores[normalized] = QuestionProbe(layers="all", normalized=normalized).scores(fused).by_layer
    counted = candidate_positions(recomputable_chunks(fused))
    by_hand = scores[False][:, counted] / scores[False][:, counted].sum(1, keepdim=True)
    assert torch.allclose(scores[True][:, counted], by_hand, atol=1e-6)
    assert torch.allclose(scores[True][:, counted].sum(1), torch.ones(warmed.lm.n_layers))


def test_an_invalid_probe_is_refused() -> None:
    with pytest.raises(ValueError, match="rows must be 'question' or 'suffix'"):
        QuestionProbe(rows="answer")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layers must be one of all, upper, third_quarter, last, or indices"):
        QuestionProbe(layers="lower")  # type: ignore[arg-type]
    for layers in (5, None, (), (-1, 2)):
        with pytest.raises(ValueError, match="or indices from 0"):
            QuestionProbe(layers=layers)  # type: ignore[arg-type]


# --- no history
