"""`qcfuse ask` and `qcfuse explain`: answer a question over a library."""

from __future__ import annotations

from pathlib import Path

from qcfuse_rag.cli.console import ERR, OUT, print_json, print_line, size
from qcfuse_rag.cli.library import open_session
from qcfuse_rag.cli.options import AskOptions
from qcfuse_rag.engine.config import EngineConfig
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.generation.decoding import Generation
from qcfuse_rag.library.session import LibraryAnswer


def ask_library(
    question: str,
    library: Path,
    config: EngineConfig,
    options: AskOptions,
    *,
    max_new_tokens: int = 128,
    explain: Path | None,
    as_json: bool,
) -> None:
    """Retrieve passages, answer a question over them, and print the answer and what was reused."""
    with open_session(library, config, options) as session:
        answer = session.answer(question, max_new_tokens=max_new_tokens)
        if as_json:
            print_json(answer.to_dict(question))
        else:
            print_answer(answer)
        if explain is not None:
            session.write_page(answer, explain)
            print_line(f"the page is {explain}", ERR)


def print_answer(answer: LibraryAnswer) -> str:
    """Print an answer as it is written, then its sources and what was reused; return its text.

    Reasoning, sources and counts go to standard error.
    """
    reasons = False
    for piece in answer.pieces():
        if piece.reasoning:
            ERR.print(piece.reasoning, end="", style="dim", highlight=False, markup=False, soft_wrap=True)
            reasons = True
        if piece.text:
            if reasons:
                ERR.print("\n")
                reasons = False
            OUT.print(piece.text, end="", highlight=False, markup=False, soft_wrap=True)
    OUT.print()
    generation = answer.stream.result()
    sources = f"sources: {', '.join(answer.sources) or 'none'}"
    for line in (sources, summary_line(generation.report), *healing_line(generation)):
        ERR.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
    return answer.response.content


def healing_line(answer: Generation) -> list[str]:
    """Return one line on how far an answer was healed and verified; none if that was not asked for."""
    healing = answer.healing
    if healing is None:
        return []
    line = f"{healing.fidelity}: {healing.exact_tokens:,} of {healing.prompt_tokens:,} prompt tokens are exact"
    if healing.verified_upto is not None:
        line += f", {healing.verified_upto:,} of {len(answer.ids):,} answer tokens verified"
    return [f"{line}; {healing.reason}" if healing.reason else line]


def summary_line(report: FusionReport) -> str:
    """Return one line on a fused prefill: method, tokens computed, bytes loaded, and time to the first token."""
    label = f"{report.method}, ratio {report.ratio:g}: " if report.base else f"{report.method}: "
    line = (
        f"{label}computed {report.rows:,} of {report.prompt_tokens:,} tokens ({report.work:.0%} over all layers), "
        f"loaded {size(report.bytes_loaded)}, first token after {report.timings.ttft_s:.2f} s"
    )
    return f"{line}; {report.fallback}" if report.fallback else line
