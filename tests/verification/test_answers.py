"""Greedy answers beside full prefill's: compared along its tokens, and decoded only where they differ."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from qcfuse_rag import LanguageModel, make_method
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.generation.teacher_forcing import greedy_answer, greedy_answers
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.prefill_base import FRAMED
from qcfuse_rag.verification.divergence import compare_greedy_answers
from tests.support import seams
from tests.support.engines import make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION

LENGTH = 8


def test_answers_that_differ_are_decoded_and_no_others(llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, decoded = make_warmed_engine(llama), []
    prompt = engine.prompt(QUESTION, PASSAGES)
    full, reuse = (
        engine.prefill(prompt, method=method, answer_tokens=LENGTH)
        for method in (make_method("full"), make_method("reuse", base=FRAMED))
    )
    answer, other = (greedy_answer(engine.runner, prefilled, LENGTH) for prefilled in (full, reuse))
    assert answer[0] != other[0], "or there is nothing to decode"

    def counted(runner: ModelRunner, prompts: Sequence[Prefilled], limit: int) -> object:
        decoded.extend(prompts)
        return greedy_answers(runner, prompts, limit)

    seams.verified_answers(monkeypatch, counted)
    same, differing = compare_greedy_answers(engine.runner, [answer, answer], [full, reuse], LENGTH)
    assert (same.ids, same.divergence.identical, same.divergence.mean_kl) == (answer[0], True, pytest.approx(0))
    assert (differing.ids, differing.divergence.identical) == (other[0], False)
    assert decoded == [reuse]
    [undecoded] = compare_greedy_answers(engine.runner, [answer], [reuse], LENGTH, decode=False)
    assert (undecoded.ids, undecoded.divergence) == (None, differing.divergence)
    assert decoded == [reuse]
