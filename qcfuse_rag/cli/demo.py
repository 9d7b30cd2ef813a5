"""`qcfuse demo`: answer questions by full prefill and over warmed caches, side by side."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jinja2 import Environment
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from qcfuse_rag.bundled import Question, corpus, default_embedder, demonstration_questions
from qcfuse_rag.cli.console import ERR, OUT, duration, print_json, print_line, progress_bar, size, status
from qcfuse_rag.cli.options import DemoOptions
from qcfuse_rag.engine.config import EngineConfig
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.generation.sampling_params import SamplingParams
from qcfuse_rag.library.embedder import Embedder
from qcfuse_rag.library.index import nearest
from qcfuse_rag.methods import make_method
from qcfuse_rag.verification.cases import string_match

SHOWN = 6
"""Number of questions without `--all`."""
ANSWER_TOKENS = 32
FUSED_SHARE = 0.5
"""Share of full prefill's time to expect of a fused answer, decoding of both included, for the estimate."""


@dataclass(slots=True)
class TimedAnswer:
    """An answer as it comes; a clock that is started again shows it again."""

    pieces: list[tuple[float, str]] = field(default_factory=list)  # the text, with the seconds at which it came
    ttft_s: float | None = None
    total_s: float | None = None
    report: FusionReport | None = None
    right: bool | None = None  # whether it contains the truth; None if that is not known
    started: float | None = None  # None while it waits

    def elapsed_s(self) -> float:
        """Return the seconds since the clock was started."""
        return time.perf_counter() - (self.started or 0.0)

    def text(self, until_s: float = float("inf")) -> str:
        """Return the text, or the part that had come after `until_s` seconds."""
        return " ".join("".join(piece for at, piece in self.pieces if at <= until_s).split())

    def clock(self, name: str) -> Text:
        """Return the name of the side, its seconds, and whether the answer is right."""
        if self.started is None and self.total_s is None:
            return Text(f"{name}: waits", style="dim")
        done = self.total_s is not None and self.elapsed_s() >= self.total_s
        shown_s = self.total_s if done and self.total_s is not None else self.elapsed_s()
        line = Text(f"{name}: ", style="cyan").append(f"{shown_s:.1f} s", style="bold")
        if done and self.right is not None:
            line.append(", right" if self.right else ", wrong", style="green" if self.right else "red")
        has_begun = self.ttft_s is not None and shown_s >= self.ttft_s
        return line.append(f"\nfirst token after {self.ttft_s:.2f} s" if has_begun else "\n", style="dim")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        assert self.report is not None
        figures = {"rows": self.report.rows, "prompt_tokens": self.report.prompt_tokens}
        times = {"ttft_s": self.ttft_s, "total_s": self.total_s}
        return {"answer": self.text(), "right": self.right, **times, **figures, "fallback": self.report.fallback}


@dataclass(frozen=True, slots=True)
class AnsweredPair:
    """A question with both answers; safe to render from another thread while they come."""

    question: Question
    full: TimedAnswer = field(default_factory=TimedAnswer)
    fused: TimedAnswer = field(default_factory=TimedAnswer)

    def render(self, title: str) -> RenderableType:
        """Return the question, the truth and both columns as they stand."""
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(self.full.clock("full prefill"), self.fused.clock("qcfuse"))
        grid.add_row(*(Text(side.text(side.elapsed_s())) for side in (self.full, self.fused)))
        truth = [Text(f"truth: {self.question.answers[0]}", style="dim")] if self.question.answers else []
        return Group(Text(f"\n{title}", style="bold"), *truth, grid)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        truth = {"question": self.question.question, "truth": list(self.question.answers)}
        same = self.full.text() == self.fused.text()
        return {**truth, "full": self.full.to_dict(), "fused": self.fused.to_dict(), "same": same}


def run_demo(config: EngineConfig, options: DemoOptions, *, as_json: bool) -> None:
    """Run the demonstration: print each question's two answers and a table, or one JSON object."""
    asked, texts = chosen_questions(options), list(corpus().values())
    if not as_json:
        _say(
            f"{len(texts)} short documents are warmed once; then {len(asked)} of the questions about them are answered "
            "twice: by full prefill, which reads the retrieved documents anew, and by qcfuse, which reuses their "
            f"caches. On two cores this takes about {'four minutes' if len(asked) > SHOWN else 'a minute and a half'}."
        )
    started = time.perf_counter()
    with ExitStack() as stack:
        folder = options.store or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qcfuse-demo-")))
        with status("loading the model and checking it against its own code"):
            # prefix_bytes=0, or a question would take the beginning of the one before
            weights = config.weights or "model"
            own = replace(config, weights=weights, store=str(folder / "kv"), compiled=False, prefix_bytes=0)
            engine = stack.enter_context(FusionEngine.load(own))
            embed = Embedder(options.embedder or default_embedder())
            vectors = embed(texts)
        plan = engine.corpus.warm_job([engine.prompts.chunk_ids(text) for text in texts]).plan(measure=not as_json)
        if not as_json and plan.seconds:
            token_s = plan.seconds / max(1, plan.tokens)
            question_tokens = options.top_k * plan.tokens / max(1, plan.to_warm)
            asking_s = len(asked) * question_tokens * token_s * (1 + FUSED_SHARE)
            _say(f"On this machine: about {duration(plan.seconds)} to warm, and {duration(asking_s)} to answer.")
        setup_s = time.perf_counter() - started
        with progress_bar(f"warming {len(texts)} documents", "tokens") as advance:
            summary = engine.warm(texts, sources=list(corpus()), progress=advance)
        with status("making the first passes, which are slower"):
            engine.compile()
        pairs = []
        for number, question in enumerate(asked, start=1):
            passages = [texts[i] for i in nearest(vectors, embed([question.question])[0], options.top_k)]
            pair = AnsweredPair(question)
            pairs.append(pair)
            if as_json:
                ask_both(engine, passages, pair, ANSWER_TOKENS)
                continue
            title = f"Question {number} of {len(asked)}: {question.question}"
            with Live(get_renderable=lambda: pair.render(title), console=OUT, refresh_per_second=8):  # noqa: B023
                ask_both(engine, passages, pair, ANSWER_TOKENS, replay=OUT.is_terminal)
    totals = summarise(pairs)
    about = (
        f"{Path(engine.lm.name).name}, {engine.lm.number_formats}, {engine.lm.device}, threads: "
        f"{torch.get_num_threads()}; {options.top_k} documents for each question"
    )
    if options.html is not None:
        options.html.write_text(demo_page(pairs, totals, about), "utf-8")
        print_line(f"wrote {options.html}", ERR)
    if as_json:
        shown = {"model": engine.lm.name, "top_k": options.top_k, "setup_s": setup_s, "warm": summary.to_dict()}
        print_json({**shown, "questions": [pair.to_dict() for pair in pairs], "summary": totals})
        return
    OUT.print(summary_table(totals))
    _say(f"{about}.")
    _say(
        f"Warmed {summary.warmed} caches ({size(summary.size_bytes)}) in {duration(summary.elapsed_s)}, once. Reused "
        "caches change some answers: `qcfuse verify` finds the share to recompute for your model and documents, and "
        "`qcfuse ask --fidelity exact` keeps full prefill's answers."
    )


def chosen_questions(options: DemoOptions) -> list[Question]:
    """Return the given question, all questions, or six spread evenly over them."""
    if options.question is not None:
        return [Question("given", options.question, (), ())]
    known = demonstration_questions()
    return known if options.all else known[:: max(1, -(-len(known) // SHOWN))]


def ask_both(
    engine: FusionEngine, passages: Sequence[str], pair: AnsweredPair, answer_tokens: int, *, replay: bool = False
) -> None:
    """Answer a question over reused caches, then by full prefill, each alone so that neither slows the other.

    `replay` shows the fused answer again, at its own pace, while full prefill's is computed.
    """
    prompt = engine.prompt(pair.question.question, passages)
    for answer, method in ((pair.fused, None), (pair.full, make_method("full"))):
        answer.started = time.perf_counter()
        if replay and answer is pair.full:
            pair.fused.started = answer.started
        stream = engine.stream(prompt, SamplingParams(max_new_tokens=answer_tokens), method=method)
        answer.report, answer.ttft_s = stream.report, answer.elapsed_s()
        for piece in stream:
            answer.pieces.append((answer.elapsed_s(), piece))
        answer.total_s = answer.elapsed_s()
        if pair.question.answers:
            answer.right = bool(string_match(answer.text(), pair.question.answers, needs_all=False))
    if replay and pair.fused.total_s is not None:  # a fused answer may be the longer one
        threading.Event().wait(max(0.0, pair.fused.total_s - pair.fused.elapsed_s()))


def summarise(pairs: Sequence[AnsweredPair]) -> dict[str, Any]:
    """Return counts of answers, and medians of seconds and tokens."""
    same = sum(pair.full.text() == pair.fused.text() for pair in pairs)
    sides = {"full": _side([pair.full for pair in pairs]), "fused": _side([pair.fused for pair in pairs])}
    return {"questions": len(pairs), "same": same, **sides}


def summary_table(totals: dict[str, Any]) -> Table:
    """Return the table; it fits 80 columns."""
    full, fused, count = totals["full"], totals["fused"], totals["questions"]
    table = Table(title=f"\n{count} question{'s' if count != 1 else ''}", title_justify="left")
    for name in ("", "full prefill", "qcfuse", ""):
        table.add_column(name, justify="right" if table.columns else "left")
    if full["right"] is not None:
        table.add_row("right answers", f"{full['right']} of {count}", f"{fused['right']} of {count}", "")
    table.add_row("the same answer", "", f"{totals['same']} of {count}", "")
    for label, name in (("time to first token, median", "ttft_s"), ("whole answer, median", "total_s")):
        sooner = f"{full[name] / fused[name]:.1f} times sooner"
        table.add_row(label, f"{full[name]:.2f} s", f"{fused[name]:.2f} s", sooner)
    table.add_row("prompt tokens computed, median", f"{full['rows']:,.0f}", f"{fused['rows']:,.0f}", "")
    return table


def demo_page(pairs: Sequence[AnsweredPair], totals: dict[str, Any], about: str) -> str:
    """Return the page with the table, a picture of the seconds and every answer; it needs nothing from elsewhere."""
    longest = max(answer.ttft_s or 0.0 for pair in pairs for answer in (pair.full, pair.fused)) or 1.0
    page = files("qcfuse_rag.cli").joinpath("demo.html").read_text("utf-8")
    template = Environment(autoescape=True).from_string(page)
    return template.render(pairs=list(pairs), totals=totals, about=about, longest=longest)


def _side(answers: Sequence[TimedAnswer]) -> dict[str, Any]:
    known = [answer.right for answer in answers if answer.right is not None]
    return {
        "right": sum(known) if known else None,
        "ttft_s": median(answer.ttft_s or 0.0 for answer in answers),
        "total_s": median(answer.total_s or 0.0 for answer in answers),
        "rows": median(answer.report.rows if answer.report else 0 for answer in answers),
    }


def _say(text: str) -> None:
    OUT.print(text, highlight=False, markup=False)
