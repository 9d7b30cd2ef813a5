"""Every report says what was reused and why the rest was not, and little reuse of a filled store is warned of once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore, FusionEngine, LanguageModel, MemoryStore, PromptTemplate, make_method
from qcfuse_rag.fusion.report import PROMPTS
from qcfuse_rag.store.key import BLIND, FRAMED
from tests.support.engines import make_engine, make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION

REUSE = make_method("reuse", base=FRAMED)
OTHER = " ".join(sorted(" ".join(PASSAGES).split())) + " "


@pytest.fixture
def engine(llama: LanguageModel) -> FusionEngine:
    return make_warmed_engine(llama, texts=PASSAGES[:2], bases=(FRAMED,))


def flat(*texts: str) -> str:
    return "\n\n".join([*texts, QUESTION])


def test_passages_that_are_given_are_counted(engine: FusionEngine) -> None:
    report = engine.prefill(engine.prompt(QUESTION, PASSAGES), method=REUSE).report
    assert (report.passages, report.passages_reused) == (3, 2)
    assert report.stored_tokens == sum(len(engine.prompts.chunk_ids(text)) for text in PASSAGES[:2])
    assert report.reuse.startswith(
        f"2 of 3 passages reused, {report.stored_tokens} of {report.context_tokens} tokens; "
    )
    assert report.reuse.endswith("1 of 3 passages computed in full: absent")
    assert report.to_dict()["reuse"] == report.reuse


def test_parts_of_one_passage_are_one(engine: FusionEngine) -> None:
    long = " ".join([*PASSAGES, *PASSAGES[::-1]])
    engine.warm([long], bases=[FRAMED])
    prompt = engine.prompt_from_text(flat(long.replace("Mondays", "Tuesdays at noon")))
    report = engine.prefill(prompt, method=REUSE).report
    assert len(report.lookups) > 1
    assert {lookup.passage for lookup in report.lookups} == {0}
    assert (report.passages, report.passages_reused) == (1, 1)


def test_a_guard_that_computes_everything_reuses_none(engine: FusionEngine) -> None:
    report = engine.prefill(engine.prompt(QUESTION, PASSAGES[:1]), method=REUSE.as_full_prefill).report
    assert (report.passages, report.passages_reused, report.stored_tokens) == (1, 0, 0)


@pytest.mark.parametrize(("times", "worth"), [(2, None), (3, "2 passages' worth")])
def test_long_text_that_is_not_found_is_told(engine: FusionEngine, times: int, worth: str | None) -> None:
    report = engine.prefill(engine.prompt_from_text([("user", flat(OTHER * times))]), method=REUSE).report
    assert report.fallback is None, "the store lacks nothing that was warmed"
    if worth is None:
        assert report.reuse == "no passages"
    else:
        said = f"{worth} of text, {report.unrecognised_tokens:,} tokens, is not in the store: never warmed, or changed"
        assert said in report.reuse
        assert report.unrecognised_tokens > 0.9 * len(engine.prompts.tokens.ids(OTHER * times))


def test_many_short_messages_are_no_passage(engine: FusionEngine) -> None:
    turns = [(role, "the old mill " * 11) for _ in range(3) for role in ("user", "assistant")]
    prompt = engine.prompt_from_text([*turns, ("user", QUESTION)])
    assert engine.prefill(prompt, method=REUSE).report.reuse == "no passages"


def test_without_passages_no_text_is_missed(llama: LanguageModel) -> None:
    engine = make_engine(llama, MemoryStore())
    report = engine.prefill(engine.prompt_from_text(flat(OTHER * 3)), method=REUSE).report
    assert (report.fallback, report.unrecognised_tokens, report.reuse) == (None, 0, "no passages")


def test_little_reuse_of_a_filled_store_is_warned_of_once(
    engine: FusionEngine, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES[2:])
    for asked in range(2 * PROMPTS):
        engine.prefill(prompt, method=REUSE)
        assert len(caplog.records) == (asked >= PROMPTS - 1)
    assert caplog.records[0].levelno == logging.WARNING
    assert "2 passages are stored; 20 times: 1 of 1 passages computed in full: absent" in caplog.text


def test_nothing_is_warned_of_where_passages_are_reused_or_none_is_stored(
    llama: LanguageModel, engine: FusionEngine, caplog: pytest.LogCaptureFixture
) -> None:
    empty, full = make_engine(llama, MemoryStore()), make_method("full")
    for asked, passages, method in (
        (engine, PASSAGES[:2], REUSE),
        (empty, PASSAGES, REUSE),
        (engine, [], REUSE),
        (engine, PASSAGES, full),
    ):
        for _ in range(PROMPTS):
            asked.prefill(asked.prompt(QUESTION, passages), method=method)
    assert not caplog.records


@pytest.mark.parametrize(("first", "told"), [(None, "(the default one)"), ("Be kind.", "(not the default one)")])
def test_passages_that_are_stored_under_another_wording_are_told(
    llama: LanguageModel, caplog: pytest.LogCaptureFixture, tmp_path: Path, first: str | None, told: str
) -> None:
    """Behind another system message they are prefilled again, in silence so far."""

    def wording(system: str) -> PromptTemplate:
        return PromptTemplate(messages=(("system", system), ("user", "{context}{question}")))

    store = DiskStore(tmp_path)
    make_engine(llama, store, template=None if first is None else wording(first)).warm(
        PASSAGES[:2], sources=["a", "b"], bases=[FRAMED]
    )
    again = make_engine(llama, store, template=wording("Be brief."))
    again.warm(PASSAGES[2:], sources=["c"], bases=[BLIND])
    assert not caplog.records
    again.warm(PASSAGES[2:], sources=["c"], bases=[FRAMED])
    assert not caplog.records, "another base is no other wording"
    for texts, count in ((PASSAGES, 2), (PASSAGES, 0)):
        caplog.clear()
        again.warm(texts, sources=["a", "b", "c"], bases=[FRAMED])
        assert [record.getMessage().startswith(f"{count} of these 3 passages") for record in caplog.records] == (
            [True] if count else []
        )
        assert not count or told in caplog.text
