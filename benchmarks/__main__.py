"""`python -m benchmarks`: list the measurements, run one, or show the figures of a file of records."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from typer import Argument, Option

from qcfuse_rag.cli.console import error_text, quiet_libraries, shows_tracebacks

PROGRAM = "python -m benchmarks"
INTERRUPTED = 130
MEASUREMENTS = {
    "quality": "Compare the answers of methods with full prefill's on the same questions and tokens.",
    "speed": "Compare time to first token and decoding with transformers and with the limits of the machine.",
    "peer": "Compare whole answers on a CPU with llama.cpp, on the same GGUF file, tokens and threads.",
    "store": "Compare writing and reading entries with plain files of the same bytes.",
    "warm": "Compare a warming job with the bare forward passes of the same passages.",
    "reuse": "Count what set-ups of LlamaIndex, LangChain and OpenAI's clients reuse of what was warmed.",
    "prices": "Compare the times to the first token that the guard predicts with those that come.",
    "profile": "Find the critical layers of a model: those in which questions attend to their answers.",
    "kernel-floors": "Time the kernels on this GPU beside torch and their lower bounds.",
}
"""Each is a module with `Options`, `measure(options, run)` and `report(run)`."""

SHOW = "show"


def module_of(name: str) -> ModuleType:
    """Import the module of a measurement."""
    return import_module(f"benchmarks.{name.replace('-', '_')}")


def show(
    records: Annotated[Path, Argument(help="File of records, such as result.partial.jsonl.")],
    json: Annotated[bool, Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show the figures of a file of records."""
    from benchmarks.runner import Run, publish

    run = Run("", records)
    run.read()
    publish(run, module_of(run.measures).report, None, as_json=json)


def main() -> None:
    """Run a command; an error is one line and exit code 1, with a traceback only under `--debug`."""
    name, *arguments = [argument for argument in sys.argv[1:] if argument != "--debug"] or ["--help"]
    commands = {**MEASUREMENTS, SHOW: "Show the figures of a file of records, finished or not."}
    if name not in commands:
        print(f"usage: {PROGRAM} COMMAND [options]; COMMAND --help lists the options\n")
        print("\n".join(f"  {command:14} {summary}" for command, summary in commands.items()))
        sys.exit(0 if name == "--help" else 2)
    quiet_libraries()
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    try:
        app.command()(_command(name))
        app(args=arguments, prog_name=f"{PROGRAM} {name}")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        if shows_tracebacks():
            raise
        print(f"error: {error_text(error)}", file=sys.stderr)
        sys.exit(1)


def _command(name: str) -> Any:
    if name == SHOW:
        return show
    from benchmarks.options import to_command
    from benchmarks.runner import Run, execute

    module = module_of(name)

    def measure(options: Any, json_file: str | None) -> None:
        execute(Run(name), lambda run: module.measure(options, run), module.report, json_file)

    measure.__doc__ = module.measure.__doc__
    return to_command(module.Options, measure)


if __name__ == "__main__":
    main()
