"""One question of the demonstration, answered by full prefill and over reused caches, with clocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qcfuse_rag.bundled import Question
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.generation.sampling_params import SamplingParams
from qcfuse_rag.methods import make_method
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.verification.cases import string_match


@dataclass(slots=True)
class TimedAnswer:
    """An answer as it comes: its pieces with the seconds at which they came.

    Attributes:
        pieces: `(seconds, text)`.
        ttft_s: seconds to the first token; None before it.
        total_s: seconds to the end; None before it.
        report: of the prefill.
        right: whether it contains the truth; None if that is not known.
    """

    pieces: list[tuple[float, str]] = field(default_factory=list)
    ttft_s: float | None = None
    total_s: float | None = None
    report: FusionReport | None = None
    right: bool | None = None

    def text(self, until_s: float | None = None) -> str:
        """Return the text, or the part that had come after `until_s` seconds."""
        pieces = [piece for at, piece in self.pieces if until_s is None or at <= until_s]
        return " ".join("".join(pieces).split())

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        assert self.report is not None
        figures = {"rows": self.report.rows, "prompt_tokens": self.report.prompt_tokens}
        times = {"ttft_s": self.ttft_s, "total_s": self.total_s}
        return {"answer": self.text(), "right": self.right, **times, **figures, "fallback": self.report.fallback}


@dataclass(frozen=True, slots=True)
class AnsweredPair:
    """A question with both answers."""

    question: Question
    full: TimedAnswer
    fused: TimedAnswer

    @property
    def same(self) -> bool:
        """Whether both answers have the same words."""
        return self.full.text() == self.fused.text()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        truth = {"question": self.question.question, "truth": list(self.question.answers)}
        return {**truth, "full": self.full.to_dict(), "fused": self.fused.to_dict(), "same": self.same}


class PairView:
    """Shows a pair while it is answered: two columns with clocks; safe to render from another thread.

    Each answer is computed alone, so that neither slows the other. The fused answer comes first; in a terminal it is
    shown again at its own pace beside full prefill's.
    """

    def __init__(self, question: Question, title: str) -> None:
        self.question, self.title = question, title
        self.full, self.fused = TimedAnswer(), TimedAnswer()
        self._running: TimedAnswer | None = None
        self._started = 0.0
        self._replaying = False

    def start(self, answer: TimedAnswer, *, replay: bool = False) -> None:
        """Start the clock of an answer; `replay` starts that of the finished fused answer again."""
        self._running, self._started, self._replaying = answer, time.perf_counter(), replay

    def stop(self) -> None:
        """Stop the clocks."""
        self._running, self._replaying = None, False

    def elapsed_s(self) -> float:
        """Return the seconds since the clock was started."""
        return time.perf_counter() - self._started

    def render(self) -> RenderableType:
        """Return the question, the truth and both columns as they stand."""
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        sides = [("full prefill", self.full), ("qcfuse", self.fused)]
        grid.add_row(*(self._clock(name, answer) for name, answer in sides))
        grid.add_row(*(Text(answer.text(self._until(answer))) for _, answer in sides))
        truth = [Text(f"truth: {self.question.answers[0]}", style="dim")] if self.question.answers else []
        return Group(Text(f"\n{self.title}", style="bold"), *truth, grid)

    def _until(self, answer: TimedAnswer) -> float | None:
        return self.elapsed_s() if self._replaying and answer is self.fused else None

    def _clock(self, name: str, answer: TimedAnswer) -> Text:
        until_s = self._until(answer)
        done = answer.total_s is not None and (until_s is None or until_s >= answer.total_s)
        if not done and not (answer is self._running or until_s is not None):
            return Text(f"{name}: waits", style="dim")
        shown_s = answer.total_s if done and answer.total_s is not None else self.elapsed_s()
        line = Text(f"{name}: ", style="cyan").append(f"{shown_s:.1f} s", style="bold")
        if done and answer.right is not None:
            line.append(", right" if answer.right else ", wrong", style="green" if answer.right else "red")
        has_begun = answer.ttft_s is not None and shown_s >= answer.ttft_s
        line.append(f"\nfirst token after {answer.ttft_s:.2f} s" if has_begun else "\n", style="dim")
        return line


def ask_both(
    engine: FusionEngine, passages: Sequence[str], view: PairView, answer_tokens: int, *, replay: bool = False
) -> AnsweredPair:
    """Answer a question over reused caches and by full prefill, one after the other.

    Args:
        engine: the engine, whose method reuses caches.
        passages: the retrieved passages.
        view: shows the answers while they come.
        answer_tokens: the most tokens of an answer.
        replay: show the fused answer again, at its own pace, while full prefill's is computed.
    """
    question = view.question
    prompt = engine.prompt(question.question, passages)
    view.start(view.fused)
    _answer(engine, prompt, None, view, view.fused, answer_tokens)
    view.start(view.full, replay=replay)
    _answer(engine, prompt, make_method("full"), view, view.full, answer_tokens)
    if replay and view.fused.total_s is not None:  # a fused answer may be the longer one
        threading.Event().wait(max(0.0, view.fused.total_s - view.elapsed_s()))
    view.stop()
    return AnsweredPair(question, view.full, view.fused)


def _answer(
    engine: FusionEngine,
    prompt: Prompt,
    method: Method | None,
    view: PairView,
    answer: TimedAnswer,
    answer_tokens: int,
) -> None:
    stream = engine.stream(prompt, SamplingParams(max_new_tokens=answer_tokens), method=method)
    answer.report, answer.ttft_s = stream.report, view.elapsed_s()
    for piece in stream:
        answer.pieces.append((view.elapsed_s(), piece))
    answer.total_s = view.elapsed_s()
    if view.question.answers:
        answer.right = bool(string_match(answer.text(), view.question.answers, needs_all=False))
