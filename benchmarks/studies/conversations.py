"""Conversations of ten turns, with and without the reuse of what earlier turns have computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from benchmarks.studies.runner import StudyResult, StudyRun, demo_questions, load_engine
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.fusion.prefix_cache import PREFIX_BYTES, common_length
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.generation.sampling import SamplingParams
from qcfuse_rag.methods import make_method
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.prompts.template import Turn
from qcfuse_rag.verification.samples import Sample

BLOCK_TOKENS = 256
"""Tokens of a block in caches that find passages on a grid, as LMCache does by default."""

MakePrompt = Callable[[FusionEngine, list[Turn], Sample, Sample], Prompt]
"""Makes the prompt of a turn: history, the first question and its passages, the turn's question and its passages."""


def _passages_first(engine: FusionEngine, history: list[Turn], first: Sample, asked: Sample) -> Prompt:
    """Put the passages of the first question in front of it; later turns ask on about them."""
    context = "".join(engine.prompts.template.format_chunk(text) for text in first.passages)
    (_, said), *rest = [*history, ("user", asked.question)]
    return engine.prompt_from_text([("user", f"{context}{said}"), *rest])


def _passages_each_turn(engine: FusionEngine, history: list[Turn], _: Sample, asked: Sample) -> Prompt:
    """Put the passages that are retrieved for a question in front of it; earlier turns keep their questions alone."""
    return engine.prompt(asked.question, asked.passages, history=history)


LAYOUTS: dict[str, MakePrompt] = {
    "passages in the first turn": _passages_first,
    "passages retrieved in each turn": _passages_each_turn,
}


@dataclass(slots=True)
class TurnFigures:
    """Figures of one turn over all conversations: seconds to the first token, and tokens."""

    without_s: list[float] = field(default_factory=list)
    with_s: list[float] = field(default_factory=list)
    prompt: int = 0
    prefix: int = 0
    passages: int = 0
    same: int = 0
    blocks: int = 0

    def add(self, report: FusionReport, without: FusionReport, same: int) -> None:
        """Add the turn of one conversation; `same` tokens are the beginning of an earlier prompt of it."""
        self.without_s.append(without.timings.ttft_s)
        self.with_s.append(report.timings.ttft_s)
        self.prompt += report.prompt_tokens
        self.prefix += report.prefix_tokens
        self.passages += report.reused_tokens - report.prefix_tokens
        self.same += same
        behind = (lookup for lookup in without.lookups if lookup.hit and lookup.start >= same)
        self.blocks += sum(lookup.tokens // BLOCK_TOKENS * BLOCK_TOKENS for lookup in behind)


def conversations(
    run: StudyRun, model: str | None = None, count: int = 3, turns: int = 10, top_k: int = 4, ratio: float = 0.15
) -> StudyResult:
    """Measure conversations over the demonstration corpus, turn by turn, with and without prefix reuse.

    The questions of a conversation are those of the demonstration, one after the other; MiniLM retrieves whole
    documents. Both sides answer every turn, in turns, and go on with the same answer. The same prompts show how many
    tokens a cache of prefixes alone would reuse, and how many together with passages in whole blocks of 256 tokens.
    """
    samples, params = demo_questions(top_k), SamplingParams(max_new_tokens=32)
    data, parts = [], list[Table | str]()
    with load_engine(model) as plain:
        method = make_method("auto", ratio=ratio)
        plain.warm((text for sample in samples for text in sample.passages), bases=method.bases)
        for layout, make_prompt in LAYOUTS.items():
            figures = [TurnFigures() for _ in range(turns)]
            for number in run.track(range(count)):
                asked = [samples[(number * turns + turn) % len(samples)] for turn in range(turns)]
                keeping = FusionEngine(plain.lm, plain.store, method=method, prefix_bytes=PREFIX_BYTES)
                keeping.compile()  # or its first request would measure the costs that the guard decides by
                history, earlier = list[Turn](), list[NDArray[np.int64]]()
                for turn, sample in enumerate(asked):
                    prompt = make_prompt(plain, history, asked[0], sample)
                    sides = [keeping, plain] if (turn + number) % 2 else [plain, keeping]
                    answers = {side is keeping: side.generate(prompt, params, method=method) for side in sides}
                    ids = np.array(prompt.ids)
                    same = max((common_length(ids, other) for other in earlier), default=0)
                    figures[turn].add(answers[True].report, answers[False].report, same)
                    earlier.append(np.array([*prompt.ids, *answers[True].ids]))
                    history += [("user", sample.question), ("assistant", answers[True].text)]
            table, line = _shown(layout, figures)
            parts += [table, line]
            data.append({"layout": layout, "turns": [_row(turn) for turn in figures], "line": line})
        name = plain.lm.name
    return StudyResult({"model": name, "count": count, "ratio": ratio, "layouts": data}, parts)


def _row(turn: TurnFigures) -> dict[str, float]:
    return {
        "tokens": turn.prompt / len(turn.with_s),
        "prefix": turn.prefix / turn.prompt,
        "passages": turn.passages / turn.prompt,
        "without_s": median(turn.without_s),
        "with_s": median(turn.with_s),
    }


def _shown(layout: str, figures: list[TurnFigures]) -> tuple[Table, str]:
    table = Table("turn", "tokens", "prefix", "passages", "without reuse", "with", "times sooner", title=layout)
    for number, turn in enumerate(figures, 1):
        row = _row(turn)
        table.add_row(
            str(number), f"{row['tokens']:,.0f}", f"{row['prefix']:.0%}", f"{row['passages']:.0%}",
            f"{row['without_s']:.3f} s", f"{row['with_s']:.3f} s", f"{row['without_s'] / row['with_s']:.1f}",
        )  # fmt: skip
    later = figures[1:] or figures
    total = sum(turn.prompt for turn in later)
    shares = [sum(getattr(turn, name) for turn in later) / total for name in ("prefix", "passages", "same", "blocks")]
    return table, (
        f"{layout}, after the first turn: {shares[0]:.1%} of the tokens reused as prefix and {shares[1]:.1%} as "
        f"passages; a cache of prefixes alone: {shares[2]:.1%}; with passages in blocks of {BLOCK_TOKENS} tokens: "
        f"{shares[2] + shares[3]:.1%}"
    )
