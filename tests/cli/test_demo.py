"""The demonstration's answers side by side: its clocks, its table and its page."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from qcfuse_rag import FusionEngine, LanguageModel
from qcfuse_rag.bundled import Question, corpus, demonstration_questions
from qcfuse_rag.cli.demo import (
    SHOWN,
    AnsweredPair,
    TimedAnswer,
    ask_both,
    chosen_questions,
    demo_page,
    summarise,
    summary_table,
)
from qcfuse_rag.cli.options import DemoOptions
from tests.support.engines import make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION

BARB = Question("q", "Who has the <key>?", ("Barb",), ())


@pytest.fixture
def engine(llama: LanguageModel) -> FusionEngine:
    return make_warmed_engine(llama)


def pair(engine: FusionEngine, question: Question, full: str, fused: str) -> AnsweredPair:
    """Return a pair with the reports of a real one and the given answers."""
    real = AnsweredPair(question)
    ask_both(engine, PASSAGES, real, 2)

    def timed(text: str, report_of: TimedAnswer, ttft_s: float) -> TimedAnswer:
        right = None if not question.answers else question.answers[0] in text
        return TimedAnswer([(ttft_s, text)], ttft_s, ttft_s + 1.0, report_of.report, right)

    return AnsweredPair(question, timed(full, real.full, 3.0), timed(fused, real.fused, 0.5))


def printed(renderable: object) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(renderable)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


def test_every_question_has_its_answer_in_its_document() -> None:
    known = demonstration_questions()
    assert len(known) >= 24
    assert all(question.answers[0] in corpus()[question.documents[0]] for question in known)


def test_a_newcomer_sees_a_few_questions_and_may_see_all() -> None:
    assert len(chosen_questions(DemoOptions())) == SHOWN
    assert chosen_questions(DemoOptions(all=True)) == demonstration_questions()
    assert [question.question for question in chosen_questions(DemoOptions(question="Who?"))] == ["Who?"]


def test_both_answers_are_timed_and_only_the_fused_one_reuses(engine: FusionEngine) -> None:
    both = AnsweredPair(Question("q", QUESTION, (), ()))
    ask_both(engine, PASSAGES, both, 4)
    full, fused = both.full.to_dict(), both.fused.to_dict()
    assert full["rows"] == full["prompt_tokens"] > fused["rows"]
    assert all(0 < side["ttft_s"] <= side["total_s"] for side in (full, fused))
    assert (full["right"], fused["right"]) == (None, None), "nobody knows"


def test_a_wrong_answer_is_shown_and_counted(engine: FusionEngine) -> None:
    pairs = [pair(engine, BARB, "It is Barb.", "It is Colm."), pair(engine, BARB, "Barb has it.", "Barb  has it.")]
    totals = summarise(pairs)
    assert (totals["full"]["right"], totals["fused"]["right"], totals["same"]) == (2, 1, 1)
    lines = printed(summary_table(totals))
    assert max(map(len, lines)) <= 80
    assert any("6.0 times sooner" in line for line in lines)


def test_the_columns_fit_eighty_characters(engine: FusionEngine) -> None:
    half = AnsweredPair(BARB, pair(engine, BARB, "It is Barb. " * 9, "It is Colm.").full)
    lines = printed(half.render("Question 1 of 1: Who has the <key>?"))
    assert max(map(len, lines)) <= 80
    assert any("right" in line and "qcfuse: waits" in line for line in lines)


def test_a_replay_shows_of_an_answer_what_had_come_by_then() -> None:
    answer = TimedAnswer([(0.5, "It is "), (0.9, "Barb.")])
    assert (answer.text(0.4), answer.text(0.6), answer.text()) == ("", "It is", "It is Barb.")


def test_the_page_shows_all_answers_and_obeys_none(engine: FusionEngine) -> None:
    pairs = [pair(engine, BARB, "It is <b>Barb</b>.", "It is Colm.")]
    page = demo_page(pairs, summarise(pairs), "a model")
    assert "It is &lt;b&gt;Barb&lt;/b&gt;." in page
    assert "Who has the &lt;key&gt;?" in page
    assert (page.count("<rect"), page.count("http")) == (2, 0)
