"""`qcfuse ask`, `qcfuse explain` and `qcfuse chat`: answer questions over a library."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from qcfuse_rag.cli.console import ERR, OUT, error_text, print_json, print_line, print_note, shows_tracebacks, size
from qcfuse_rag.cli.library import open_session
from qcfuse_rag.cli.options import AskOptions, CorpusOptions, JobOptions
from qcfuse_rag.cli.warm import print_left_out, run_job
from qcfuse_rag.engine.config import EngineConfig
from qcfuse_rag.errors import PromptTooLong, QCFuseError
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.generation.decoding import Generation
from qcfuse_rag.library.jobs import JobRecord
from qcfuse_rag.library.session import LibraryAnswer, LibrarySession
from qcfuse_rag.prompts.template import Message


def ask_library(
    question: str,
    library: Path,
    config: EngineConfig,
    options: AskOptions,
    *,
    documents: Sequence[Path] = (),
    max_new_tokens: int = 128,
    explain: Path | None,
    as_json: bool,
) -> None:
    """Retrieve passages, answer a question over them, and print the answer and what was reused.

    Documents are warmed first, where they are not; the record of an unfinished job stays, for `qcfuse warm resume`.
    """
    lm = None
    if documents:
        corpus, finished = CorpusOptions(paths=list(documents), tenant=options.tenant), True
        with suppress(QCFuseError):  # there was no job before, whose passages are not to be split anew
            last = JobRecord.load(library)
            given, finished = last.arguments, last.state == "finished"
            corpus = replace(corpus, **{name: given[name] for name in ("max_tokens", "batch_tokens") if name in given})
        summary, engine = run_job(library, config, corpus, JobOptions(embedder=options.embedder), recorded=finished)
        print_left_out(summary)
        lm = engine.lm
    with open_session(library, config, options, lm=lm) as session:
        answer = session.answer(question, session.retrieve(question), max_new_tokens=max_new_tokens)
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
    print_pieces((piece.reasoning, piece.text) for piece in answer.pieces())
    generation = answer.stream.result()
    sources = f"sources: {', '.join(answer.sources) or 'none'}"
    for line in [sources, summary_line(generation.report), *healing_line(generation)]:
        ERR.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
    return answer.response.content


def print_pieces(pieces: Iterable[tuple[str, str]]) -> None:
    """Print reasoning to standard error and text to standard output, as they come."""
    reasons = False
    for reasoning, text in pieces:
        if reasoning:
            ERR.print(reasoning, end="", style="dim", highlight=False, markup=False, soft_wrap=True)
            reasons = True
        if text:
            if reasons:
                ERR.print("\n")
                reasons = False
            OUT.print(text, end="", highlight=False, markup=False, soft_wrap=True)
    OUT.print()


def summary_line(report: FusionReport) -> str:
    """Return one line on a fused prefill: method, tokens computed, bytes loaded, time to the first token, and reuse."""
    label = f"{report.method}, ratio {report.ratio:g}: " if report.base else f"{report.method}: "
    line = (
        f"{label}computed {report.rows:,} of {report.prompt_tokens:,} tokens ({report.work:.0%} over all layers), "
        f"loaded {size(report.bytes_loaded)}, first token after {report.timings.ttft_s:.2f} s"
    )
    return f"{line}; {report.reuse}"


def healing_line(answer: Generation) -> list[str]:
    """Return one line on how far an answer was healed and verified; none if that was not asked for."""
    healing = answer.healing
    if healing is None:
        return []
    line = f"{healing.fidelity}: {healing.exact_tokens:,} of {healing.prompt_tokens:,} prompt tokens are exact"
    if healing.verified_upto is not None:
        line += f", {healing.verified_upto:,} of {len(answer.ids):,} answer tokens verified"
    return [f"{line}; {healing.reason}" if healing.reason else line]


with suppress(ImportError):  # gives `input` line editing and, for this session only, the questions by arrow keys
    import readline  # noqa: F401

HELP = """\
Write a question. The answer is over the passages that are nearest to it, after the conversation so far.
/explain [FILE]  write a page that shows how the last answer's prompt was computed; explain.html by default
/help            this text
/quit            end, as Ctrl-D does; Ctrl-C ends an answer. Nothing of the conversation is stored."""


@dataclass(slots=True)
class Conversation:
    """A conversation over a library."""

    session: LibrarySession
    max_new_tokens: int  # of an answer
    history: list[Message] = field(default_factory=list)  # earlier questions and answers, without their passages
    last: LibraryAnswer | None = None

    def ask(self, question: str) -> None:
        """Answer a question after the conversation so far, and print the answer and its sources.

        If the prompt is too long, the oldest question and answer are left out until it fits.

        Raises:
            PromptTooLong: if it is too long even without the earlier conversation.
        """
        self.last = None  # frees its keys and values
        history, retrieved = list(self.history), self.session.retrieve(question, self.history)
        while True:
            try:
                answer = self.session.answer(question, retrieved, history=history, max_new_tokens=self.max_new_tokens)
                break
            except PromptTooLong:
                if not history:
                    raise
                del history[:2]
        if left_out := (len(self.history) - len(history)) // 2:
            print_note(
                "note:", f"the model's context is full; the oldest {left_out} question(s) are left out from now on"
            )
        text = print_answer(answer)
        self.history = [*history, ("user", question), ("assistant", text)]
        self.last = answer

    def explain(self, name: str) -> None:
        """Write the page of the last answer, and print its path."""
        if self.last is None:
            print_line("There is no answer to explain yet; ask a question first.")
            return
        path = Path(name or "explain.html").expanduser()
        self.session.write_page(self.last, path)
        print_line(f"The page is {path.resolve().as_uri()}")


def chat_with_library(library: Path, config: EngineConfig, options: AskOptions, *, max_new_tokens: int) -> None:
    """Answer questions from standard input until it ends or `/quit`."""
    with open_session(library, config, options) as session:
        conversation = Conversation(session, max_new_tokens)
        interactive = sys.stdin.isatty()
        if interactive:
            print_line(f"{session.engine.lm.name} over {library}; /help lists the commands", ERR)
        while (line := _read_line("> " if interactive else "")) is not None:
            if line == "/quit":
                return
            if line:
                _obey(conversation, line)


def _read_line(prompt: str) -> str | None:
    """Return the next line; None at the end. Ctrl-C gives an empty line."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print_line("\n/quit or Ctrl-D ends the conversation", ERR)
        return ""


def _obey(conversation: Conversation, line: str) -> None:
    """Answer a line; an error or Ctrl-C ends that, and the conversation goes on, but for errors under `--debug`."""
    command, _, argument = line.partition(" ")
    try:
        if not line.startswith("/"):
            conversation.ask(line)
        elif command == "/explain":
            conversation.explain(argument.strip())
        elif command == "/help":
            print_line(HELP)
        else:
            print_line(f"There is no command {command}; /help lists the commands.")
    except KeyboardInterrupt:
        print_line("\ninterrupted; the conversation goes on without this answer", ERR)
    except Exception as error:
        if shows_tracebacks():
            raise
        print_note("error:", error_text(error), "red")
