"""`python -m benchmarks`: measure this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from typer import Option

from benchmarks.options import (
    BenchPeerOptions,
    BenchQualityOptions,
    BenchSpeedOptions,
    DiskFolder,
    ProfileOptions,
    Repeats,
)
from qcfuse_rag.bundled import default_model
from qcfuse_rag.cli.console import (
    OUT,
    duration,
    error_text,
    print_json,
    print_line,
    progress_bar,
    quiet_libraries,
    shows_tracebacks,
    size,
    status,
)
from qcfuse_rag.cli.options import Json, expand_options
from qcfuse_rag.engine.config import ModelConfig
from qcfuse_rag.errors import QCFuseError

if TYPE_CHECKING:
    from qcfuse_rag.runtime.language_model import LanguageModel

app = typer.Typer(
    help="Measure methods, models and machines. Each command writes what it measures; see benchmarks/README.md.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

STUDIES = {
    "compare": "Pool results of `python -m benchmarks quality` and compare one method with the others.",
    "demo-quality": "Compare the answers of methods on the demonstration corpus.",
    "kernel-floors": "Time the kernels on this GPU beside torch and their lower bounds.",
    "kvsharearena": "Answer frozen questions of KVShareArena; the performance gap that each method recovers.",
    "ladder": "Compare `auto` at several ratios with full prefill's answers.",
    "weights": "Compare int8 weights with the model's own: seconds, bytes, divergence.",
}


@app.command("store")
def bench_store(
    folder: DiskFolder = None,
    megabytes: Annotated[int, Option("--mb", min=1, help="Megabytes of entries for each size of entry.")] = 512,
    repeats: Repeats = 5,
    as_json: Json = False,
) -> None:
    """Compare writing and reading entries with plain files of the same bytes, with 1 to 8 threads."""
    from benchmarks.speed.store import measure_store

    with status("measuring"):
        result = measure_store(folder, megabytes=megabytes, repeats=repeats)
    if as_json:
        print_json(result)
    else:
        OUT.print(store_table(result))


@app.command("warm")
@expand_options
def bench_warm(
    options: ModelConfig,
    chunks: Annotated[int, Option(min=1, help="Number of passages, of mixed lengths.")] = 40,
    repeats: Repeats = 3,
    batch_tokens: Annotated[int | None, Option(min=1, help="Maximum tokens in one pass.")] = None,
    as_json: Json = False,
) -> None:
    """Compare a warming job with the bare forward passes of the same passages."""
    from benchmarks.speed.warming import measure_warming

    with status("measuring"):
        lm = _load(options)
        result = measure_warming(lm, chunks=chunks, repeats=repeats, batch_tokens=batch_tokens)
    if as_json:
        print_json(result)
    else:
        OUT.print(warming_table(result))


@app.command("speed")
@expand_options
def bench_speed(options: BenchSpeedOptions, as_json: Json = False) -> None:
    """Compare time to first token and decoding with transformers and with the limits of the machine."""
    from benchmarks.speed.measure import run_speed
    from benchmarks.speed.shapes import random_model
    from benchmarks.speed.tables import terminal_tables

    if options.model is not None and options.shape is not None:
        raise QCFuseError("give a --model or a --shape, not both")
    speed_options, out = options.to_speed_options(), options.out
    if options.shape is None:
        lm = _load(options)
    else:
        lm = random_model(options.shape, device=options.device, dtype=options.dtype)
    with progress_bar("measuring", "contexts") as advance:
        result = run_speed(lm, speed_options, out, advance)
    if as_json:
        print_json(result)
        return
    for table in terminal_tables(result, OUT.width):
        OUT.print(table)
    if out is not None:
        no_picture = result["about"].get("no_picture")
        endings = (out.suffix, ".md") if no_picture else (out.suffix, ".md", ".png")
        print_line(f"written: {', '.join(str(out.with_suffix(ending)) for ending in endings)}")
        if no_picture:
            print_line(f"no picture: {no_picture}")


@app.command("peer")
@expand_options
def bench_peer(options: BenchPeerOptions, as_json: Json = False) -> None:
    """Compare whole answers on a CPU with llama.cpp, on the same GGUF file, tokens and threads."""
    from benchmarks.speed.peer import compare_peer, peer_table

    with progress_bar("answering", "lengths") as advance:
        result = compare_peer(options.to_peer_options(), advance)
    if as_json:
        print_json(result)
    else:
        OUT.print(peer_table(result))


@app.command("quality")
@expand_options
def bench_quality(options: BenchQualityOptions) -> None:
    """Compare the answers of methods with full prefill on the same questions and tokens; a second run continues."""
    from benchmarks.quality.measure import measure_quality
    from benchmarks.quality.tables import LEGEND, draw, terminal_tables

    out = options.out
    with progress_bar("asking", "questions") as advance:
        result = measure_quality(options.to_quality_options(), advance)
    for table in terminal_tables(result["summary"], OUT.width):
        OUT.print(table)
    for line in (LEGEND, *result["about"]["notes"]):
        OUT.print(line, highlight=False, markup=False)
    written = [out, out.with_suffix(".md")]
    try:
        written += draw(result["summary"], options.plots or out.parent, out.stem)
    except QCFuseError as error:  # without matplotlib
        print_line(f"no pictures: {error}")
    print_line("written: " + ", ".join(map(str, written)))


@app.command("profile")
@expand_options
def profile(options: ProfileOptions, as_json: Json = False) -> None:
    """Find the critical layers of a model: the layers in which questions attend to their answers."""
    from benchmarks.profile.command import run_profile

    run_profile(options, as_json=as_json)


def store_table(result: Mapping[str, Any]) -> Table:
    """Return the rates of a store as a table."""
    columns = ("entry", "operation", "threads", "store MB/s", "bare MB/s", "of bare", "recycled MB/s", "of recycled")
    table = Table(*columns, title=f"A store in {escape(result['folder'])}, medians of {result['repeats']}")
    for rate in result["rates"]:
        row = [size(rate["entry_bytes"]), rate["operation"], str(rate["threads"]), f"{rate['store_mb_s']:,.0f}"]
        row += [f"{rate['bare_mb_s']:,.0f}", f"{rate['of_bare']:.2f}"]
        if rate["recycled_mb_s"] is not None:
            row += [f"{rate['recycled_mb_s']:,.0f}", f"{rate['of_recycled']:.2f}"]
        table.add_row(*row)
    return table


def warming_table(result: Mapping[str, Any]) -> Table:
    """Return the rates of a warming job as a table."""
    table = Table("", "seconds", "tokens a second", title=f"{result['chunks']} chunks, {result['tokens']:,} tokens")
    for name, side in (("bare forward passes", "bare_s"), ("warming job", "job_s")):
        middle = median(result[side])
        table.add_row(name, duration(middle), f"{result['tokens'] / middle:,.0f}")
    table.add_row("job / bare", f"{result['throughput_to_bare']:.2f}", "")
    return table


def _load(options: ModelConfig) -> LanguageModel:
    from qcfuse_rag.runtime.language_model import LanguageModel

    return LanguageModel.load(
        options.model or default_model(), device=options.device, dtype=options.dtype, weights=options.weights or "model"
    )


def main() -> None:
    """Run a command; an error is one line and exit code 1, with a traceback only under `--debug`."""
    quiet_libraries()
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    for study, summary in STUDIES.items():
        if arguments[:1] == [study]:  # only then: their modules take seconds to import
            from benchmarks.studies.runner import to_command

            name = study.replace("-", "_")
            app.command(study)(to_command(getattr(import_module(f"benchmarks.studies.{name}"), name)))
        elif arguments[:1] in ([], ["--help"]):
            app.command(study, help=summary)(lambda: None)
    try:
        app(args=arguments, prog_name="python -m benchmarks")
    except Exception as error:
        if shows_tracebacks():
            raise
        print(f"error: {error_text(error)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
