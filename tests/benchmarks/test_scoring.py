"""Scores of answers, means with intervals, and the gap recovered as KVShareArena has it."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.scoring import gap_recovered, mean_interval, scores, token_f1
from qcfuse_rag.verification.cases import string_match


def test_words_are_compared_without_case_punctuation_and_articles() -> None:
    assert token_f1("The Eiffel  Tower!", ["eiffel tower"]) == 1
    assert token_f1("in the Eiffel Tower", ["Paris", "Eiffel Tower"]) == pytest.approx(2 * 2 / 5)
    assert token_f1("", ["Paris"]) == 0
    assert token_f1("no no no", ["no"]) == pytest.approx(0.5), "a word counts as often as both have it"


def test_parts_of_an_answer_count_each_when_all_are_needed() -> None:
    gold = ["123", "456", "789", "000"]
    assert string_match("123 and 456", gold, needs_all=True) == 0.5
    assert string_match("123 and 456", gold, needs_all=False) == 1
    assert string_match("Orla", ["ORLA"], needs_all=False) == 1
    assert scores("123, 456, 789, 000", gold, needs_all=True) == {"f1": 1, "match": 1}


def test_an_interval_is_where_the_means_of_resamples_lie() -> None:
    values = [0.0, 1.0] * 50
    found = mean_interval(values)
    half = 1.96 * statistics.pstdev(values) / 10
    assert found["mean"] == 0.5
    assert (found["low"], found["high"]) == (pytest.approx(0.5 - half, abs=0.02), pytest.approx(0.5 + half, abs=0.02))
    assert mean_interval(values) == found
    assert mean_interval([0.25]) == {"mean": 0.25, "low": 0.25, "high": 0.25}


def test_the_gap_recovered_is_of_means() -> None:
    without_passages, full = [0.0, 0.25, 0.0, 0.25], [1.0, 0.75, 1.0, 0.75]  # means 0.125 and 0.875
    result = gap_recovered([0.5, 0.0, 1.0, 0.5], without_passages, full)
    assert result["pgr"] == pytest.approx((0.5 - 0.125) / 0.75)
    assert result["pgr_undefined"] == 0
    same_everywhere = gap_recovered([0.5] * 4, [0.25] * 4, [1.25] * 4)
    assert [same_everywhere[name] for name in ("pgr", "pgr_low", "pgr_high")] == [0.25] * 3
    assert gap_recovered([1.0, 0.0], [0.5, 0.5], [0.0, 0.5])["pgr"] is None, "no gap is no share"
    uncertain = gap_recovered([1.0, 0.0, 0.0], [0.0] * 3, [1.0, 0.0, 0.0])
    assert (uncertain["pgr"], uncertain["pgr_low"], uncertain["pgr_high"]) == (1.0, None, None)
    # Resamples without the first question: (2/3)^3.
    assert uncertain["pgr_undefined"] == pytest.approx(8 / 27, abs=0.02)
