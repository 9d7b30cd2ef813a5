"""Prompt lookup decoding beside plain steps: passes and seconds of a token, and how many answers are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.studies.runner import StudyResult, StudyRun, demo_questions, load_engine
from qcfuse_rag.bundled import corpus
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.generation.decode import Generation, TextStream
from qcfuse_rag.generation.sampling import SamplingParams
from qcfuse_rag.methods import make_method
from qcfuse_rag.verification.checks import Case, fit_cases


def prompt_lookup(
    run: StudyRun,
    model: str | None = None,
    size: int = 24,
    top_k: int = 4,
    ratio: float = 0.15,
    answer_tokens: int = 96,
    long_answers: bool = False,
) -> StudyResult:
    """Answer each question with and without candidates, in turns; greedy answers end where the model ends them.

    The demonstration's questions over the documents that MiniLM finds nearest, by `auto`; with `--long-answers` the
    questions about random passages, whose answers are longer. A first question, which is not counted, warms
    up.
    """
    method = make_method("auto", ratio=ratio, guard=False)
    sides = {
        "steps": SamplingParams(max_new_tokens=answer_tokens, prompt_lookup_num_tokens=0),
        "prompt lookup": SamplingParams(max_new_tokens=answer_tokens),
    }
    if long_answers:
        cases = fit_cases(list(corpus().values()), size + 1)
    else:
        samples = demo_questions(top_k, size + 1)
        cases = [Case(sample.question, sample.passages, answer_tokens) for sample in samples]
    answers: dict[str, list[Generation]] = {side: [] for side in sides}
    with load_engine(model) as engine:
        for index, case in enumerate(run.track(cases)):
            engine.warm(case.passages)
            prompt = engine.prompt(case.question, case.passages)
            for side, params in sides.items():
                prefilled = engine.prefill(prompt, method=method, answer_tokens=answer_tokens)
                answer = TextStream(engine.runner, prefilled, params).result()
                if index:
                    answers[side].append(answer)
        about = {"model": engine.lm.name, "dtype": str(engine.lm.dtype), "ratio": ratio}
    if not any(len(answer.ids) > 1 for answer in answers["steps"]):
        raise QCFuseError("no answer has more than one token; ask more questions")
    rows = {side: _totals(generations) for side, generations in answers.items()}
    same = sum(plain.ids == looked_up.ids for plain, looked_up in zip(*answers.values(), strict=True))
    table = Table("", "tokens", "passes", "tokens a pass", "ms a token")
    for side, row in rows.items():
        figures = (f"{row['tokens'] / row['passes']:.2f}", f"{1000 * row['seconds'] / row['tokens']:.1f}")
        table.add_row(side, str(row["tokens"]), str(row["passes"]), *figures)
    shown = f"{same} of {len(answers['steps'])} answers are the same; {about['dtype']}"
    return StudyResult({**about, "same": same, "sides": rows}, [table, shown])


def _totals(answers: Sequence[Generation]) -> Mapping[str, Any]:
    """Add up the tokens behind the first one of each answer, their passes and their seconds."""
    return {
        "tokens": sum(len(answer.ids) - 1 for answer in answers),
        "passes": sum(answer.passes for answer in answers),
        "seconds": sum(answer.decode_s for answer in answers),
    }
