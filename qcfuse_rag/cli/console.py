"""Terminal output of the commands: text or JSON, progress bars, sizes and durations."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment

from qcfuse_rag.errors import QCFuseError

UNSAFE_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Matches characters that command a terminal, or reorder or hide text, and surrogates; tab and line feed may stay."""


def make_harmless(text: str) -> str:
    """Return a text with JSON's escapes in place of characters that a terminal would obey.

    Names of documents and messages of errors may come from anyone.
    """
    return UNSAFE_CHARACTERS.sub(lambda match: json.dumps(match[0])[1:-1], text)


LINE_INTERVAL_S = 10.0
"""Seconds between lines of progress where there is no terminal."""


class HarmlessConsole(Console):
    """A terminal that shows control characters instead of obeying them, wherever the text comes from."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of what is printed; only Rich's own control codes stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(make_harmless(segment.text), segment.style)


OUT = HarmlessConsole()
ERR = HarmlessConsole(stderr=True)


def with_full_stop(text: str) -> str:
    """Return a message as a sentence that ends."""
    text = text.rstrip()
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


def shows_tracebacks() -> bool:
    """Return whether the command line has the flag `--debug`."""
    return "--debug" in sys.argv


def error_text(error: Exception) -> str:
    """Return the message of an error, with its type if it is none of those that say what is wrong."""
    if isinstance(error, (QCFuseError, ValueError, OSError)):
        return str(error)
    return f"{type(error).__name__}: {error} (--debug shows where)"


def print_json(data: Mapping[str, Any]) -> None:
    """Write one JSON object to standard output and nothing else."""
    print(make_harmless(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)))


def print_line(text: str, console: Console = OUT) -> None:
    """Print plain text without colours, markup or breaks."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def print_note(label: str, text: str, colour: str = "yellow") -> None:
    """Print a coloured label and plain text on standard error."""
    ERR.print(f"[{colour}]{label}[/{colour}] {escape(text)}", highlight=False, soft_wrap=True)


def print_result(data: Mapping[str, Any], as_json: bool, *lines: str) -> None:
    """Print one JSON object, or the lines."""
    if as_json:
        print_json(data)
    else:
        for line in lines:
            print_line(line)


def _progress_lines(title: str, unit: str) -> Callable[[int, int], None]:
    """Return what prints progress for logs: a line at the first call, now and then, and at the last call."""
    started, next_line = time.monotonic(), 0.0

    def advance(done: int, total: int) -> None:
        nonlocal next_line
        passed_s = time.monotonic() - started
        if passed_s < next_line and done < total:
            return
        next_line = passed_s + LINE_INTERVAL_S
        line = f"{title}: {done:,} of {total:,} {unit}"
        if done >= total:
            line += f" in {duration(passed_s)}"
        elif done and passed_s > 0:
            line += f", about {duration(passed_s / done * (total - done))} left"
        print_line(line, ERR)

    return advance


@contextmanager
def progress_bar(title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress on standard error, apart from the results; yield what advances it: `(done, total)`.

    A terminal shows a bar. Elsewhere, as in a log, a line is printed at most every `LINE_INTERVAL_S`.
    """
    if not ERR.is_terminal:
        yield _progress_lines(title, unit)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,} of {task.fields[all]} {task.fields[unit]}{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=ERR) as progress:
        task = progress.add_task(title, total=None, unit=unit, all="?", rate="")
        started = time.monotonic()

        def advance(done: int, total: int) -> None:
            rate = f", {done / max(time.monotonic() - started, 1e-9):,.3g} per second" if done else ""
            progress.update(task, completed=done, total=total, all=f"{total:,}", rate=rate)

        yield advance


@contextmanager
def status(title: str) -> Iterator[None]:
    """Show a spinner on standard error while the block runs; where there is no terminal, a line when it begins."""
    if not ERR.is_terminal:
        print_line(f"{title} ...", ERR)
    with ERR.status(title):
        yield
    ERR.print(f"[green]done[/green] {title}", highlight=False)


def quiet_libraries() -> None:
    """Suppress progress bars and notices of other libraries; call this before they are imported."""
    for name, value in {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TQDM_DISABLE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "KINETO_LOG_LEVEL": "99",  # log of torch's profiler, which measures memory
    }.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def size(count: float) -> str:
    """Format a number of bytes with three digits and a decimal unit."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} PB"


def duration(seconds: float) -> str:
    """Format seconds as seconds, minutes, hours or days."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes >= 2 * 24 * 60:
        return f"{minutes / 24 / 60:,.0f} days"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
