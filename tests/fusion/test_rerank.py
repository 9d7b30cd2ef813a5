"""Reranking: the scores are those of a plain forward over each passage alone, and nothing is read twice."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from qcfuse_rag import DiskStore, FusionEngine, LanguageModel, MemoryStore, PromptTemplate, TieredStore, make_method
from qcfuse_rag.errors import InvalidSetting, InvalidTemplate, PromptTooLong
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.rerank import question_likelihoods
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import FRAMED, PRIMED, ChunkKey
from tests.support import references
from tests.support.engines import damaged, make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION

REUSE = make_method("reuse", base=FRAMED)


def reference(engine: FusionEngine, text: str, most: int | None = None) -> float:
    """The mean log-likelihood of the question, or of its last tokens, computed slowly."""
    prompt = engine.prompts.build(QUESTION, [text])
    asked = engine.prompts.tokens.ids(QUESTION)
    stop = next(span.stop for span in prompt.spans if span.segment.ids == asked)
    logits = references.plain_forward(engine.lm, prompt.ids[:stop])[0]
    chances = logits.log_softmax(-1)[torch.arange(stop - len(asked) - 1, stop - 1), list(asked)]
    return float(chances[-(most or len(asked)) :].mean())


@pytest.mark.parametrize("warmed", [len(PASSAGES), 1, 0], ids=["stored", "one stored", "none stored"])
def test_scores_are_those_of_a_plain_forward_whatever_is_stored(family: LanguageModel, warmed: int) -> None:
    engine = make_warmed_engine(family, method=REUSE, texts=PASSAGES[:warmed])
    found = engine.rerank(QUESTION, PASSAGES)
    expected = [reference(engine, text) for text in PASSAGES]
    assert found.scores == pytest.approx(expected, abs=1e-4)
    assert list(found.order) == sorted(range(len(PASSAGES)), key=lambda index: -expected[index])
    assert [lookup.hit for lookup in found.lookups] == [index < warmed for index in range(len(PASSAGES))]
    assert (found.fallback is None) == (warmed == len(PASSAGES))
    alone = [engine.rerank(QUESTION, [text]).scores[0] for text in PASSAGES]
    assert found.scores == pytest.approx(alone, abs=1e-4), "passages of a pass do not see each other"
    assert not engine.rerank(QUESTION, []).scores


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_the_last_tokens_of_a_long_question_are_scored(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr("qcfuse_rag.fusion.rerank.SCORED_TOKENS", most)
    engine = make_warmed_engine(llama, method=REUSE)
    expected = [reference(engine, text, most) for text in PASSAGES]
    assert engine.rerank(QUESTION, PASSAGES).scores == pytest.approx(expected, abs=1e-4)


def test_only_the_questions_rows_are_computed_for_stored_passages(llama: LanguageModel) -> None:
    engine = make_warmed_engine(llama, method=REUSE)
    found = engine.rerank(QUESTION, PASSAGES * 20, top_k=3)
    assert len(found.order) == 3
    assert 2 * found.rows < found.prompt_tokens
    assert found.rows % (20 * len(PASSAGES)) == 0
    assert found.bytes_loaded > 0
    assert found.summary.startswith(f"60 of 60 passages reused, computed {found.rows:,} of ")


@pytest.mark.parametrize(("prompts_of_a_pass", "passes"), [(1, 3), (2, 2), (3, 1)])
def test_the_bytes_of_a_pass_are_bounded(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch, prompts_of_a_pass: int, passes: int
) -> None:
    engine, sizes = FusionEngine(llama, MemoryStore(), method=REUSE), []

    def likelihoods(placed: Sequence[FusedPrompt]) -> list[float]:
        sizes.append(len(placed))
        return question_likelihoods(placed)

    expected = engine.rerank(QUESTION, PASSAGES).scores
    longest = max(len(engine.prompt(QUESTION, [text])) for text in PASSAGES)
    monkeypatch.setattr("qcfuse_rag.fusion.rerank.question_likelihoods", likelihoods)
    monkeypatch.setattr("qcfuse_rag.fusion.rerank.PASS_BYTES", prompts_of_a_pass * longest * llama.kv_bytes_per_token)
    assert engine.rerank(QUESTION, PASSAGES).scores == pytest.approx(expected, abs=1e-4)
    assert (len(sizes), max(sizes)) == (passes, prompts_of_a_pass)


def test_retrieved_scores_count_as_much(llama: LanguageModel) -> None:
    engine = make_warmed_engine(llama, method=REUSE)
    plain = engine.rerank(QUESTION, PASSAGES)
    worst = plain.order[-1]
    liked = engine.rerank(QUESTION, PASSAGES, retrieved=[float(index == worst) for index in range(len(PASSAGES))])
    assert liked.likelihoods == plain.scores
    assert list(liked.order) == sorted(range(len(PASSAGES)), key=lambda index: -liked.scores[index])
    assert liked.order.index(worst) < plain.order.index(worst)
    assert engine.rerank(QUESTION, PASSAGES, retrieved=[0.5] * len(PASSAGES)).order == plain.order


@pytest.mark.parametrize(("exact_first", "more"), [(False, 0), (True, 1)])
def test_an_answer_reads_nothing_again_that_reranking_read(
    llama: LanguageModel, tmp_path: Path, exact_first: bool, more: int
) -> None:
    """Of its first passage, `auto` reads the framed cache, which is exact there."""
    auto = make_method("auto", guard=False, exact_first=exact_first)
    with DiskStore(tmp_path) as disk:
        FusionEngine(llama, disk, method=auto).warm(PASSAGES, bases=(FRAMED, PRIMED))
    far = DiskStore(tmp_path)
    with TieredStore(MemoryStore(), far) as tiered:
        engine = FusionEngine(llama, tiered, method=auto)
        best = [PASSAGES[index] for index in engine.rerank(QUESTION, PASSAGES, top_k=2).order]
        read = far.stats()[0].hits
        assert read >= len(PASSAGES)
        report = engine.prefill(engine.prompt(QUESTION, best)).report
        assert all(lookup.hit for lookup in report.lookups)
        assert far.stats()[0].hits == read + more


@pytest.mark.parametrize("method", [REUSE, make_method("auto", guard=False)], ids=["read", "looked up"])
def test_a_store_that_hangs_is_said_to_have_no_passage(llama: LanguageModel, method: Method) -> None:
    class Hanging(MemoryStore):
        hangs = False

        def __contains__(self, key: ChunkKey | str) -> bool:
            time.sleep(5.0 if self.hangs else 0.0)
            return super().__contains__(key)

        def get(self, key: ChunkKey) -> ChunkKV | Miss:
            time.sleep(5.0 if self.hangs else 0.0)
            return super().get(key)

    store = Hanging()
    engine = make_warmed_engine(llama, store, method=method, load_limit_s=0.2)
    store.hangs = True
    found = engine.rerank(QUESTION, PASSAGES)
    assert found.likelihoods == pytest.approx([reference(engine, text) for text in PASSAGES], abs=1e-4)
    assert [lookup.hit for lookup in found.lookups] == [False] * len(PASSAGES)
    assert "passages computed in full" in str(found.fallback)


def test_damaged_caches_are_computed_anew(llama: LanguageModel) -> None:
    class Broken(MemoryStore):
        def get(self, key: ChunkKey) -> ChunkKV | Miss:
            found = super().get(key)
            return damaged(found, "value.1") if isinstance(found, ChunkKV) and key.base == FRAMED.name else found

    engine = make_warmed_engine(llama, Broken(), method=REUSE)
    found = engine.rerank(QUESTION, PASSAGES)
    assert found.scores == pytest.approx([reference(engine, text) for text in PASSAGES], abs=1e-4)
    assert not any(lookup.hit for lookup in found.lookups)
    assert "passages computed in full" in str(found.fallback)


@pytest.mark.parametrize("before", ["", "x", "Why? " * 100_000], ids=["all", "one more", "many more"])
def test_passages_are_ordered_by_the_end_of_a_question(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """So no question is many rows for each passage; blanks behind it are no part of it."""
    monkeypatch.setattr("qcfuse_rag.fusion.rerank.QUESTION_CHARACTERS", 80)
    engine, end = FusionEngine(llama, MemoryStore(), method=REUSE), QUESTION.rjust(80, "y")
    expected = engine.rerank(end, PASSAGES)
    found = engine.rerank(f"{before}{end}{' ' * 1000}", PASSAGES)
    assert (found.likelihoods, found.rows) == (expected.likelihoods, expected.rows)
    assert engine.rerank(end[1:], PASSAGES).likelihoods != expected.likelihoods


def test_what_cannot_be_ordered_is_refused(llama: LanguageModel) -> None:
    engine = FusionEngine(llama, MemoryStore(), method=REUSE)
    with pytest.raises(InvalidSetting, match="question without text"):
        engine.rerank(" " * 2000, PASSAGES)
    with pytest.raises(PromptTooLong):
        engine.rerank(QUESTION, [PASSAGES[0], PASSAGES[0] * 100])
    for text in ("{question} {context} Answer:", "{context}{question}"):
        wording = PromptTemplate(messages=(("user", text),))
        with pytest.raises(InvalidTemplate, match="before the passages, or no text between"):
            FusionEngine(llama, MemoryStore(), template=wording, method=REUSE).rerank(QUESTION, PASSAGES)
