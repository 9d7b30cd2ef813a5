"""The `qcfuse` command: its subcommands, options and exit codes."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape

from qcfuse_rag.cli.console import (
    ERR,
    OUT,
    duration,
    error_text,
    print_json,
    print_line,
    print_result,
    quiet_libraries,
    shows_tracebacks,
    with_full_stop,
)
from qcfuse_rag.cli.options import (
    LIBRARY,
    METHOD,
    WORDING,
    AskOptions,
    CorpusOptions,
    DemoOptions,
    JobOptions,
    Json,
    Library,
    LoadedModel,
    ModelAndMethod,
    PrefixOptions,
    Question,
    ServeOptions,
    VerifyOptions,
    WordedModel,
    expand_options,
)
from qcfuse_rag.cli.store import store_app
from qcfuse_rag.declared_options import declared_options
from qcfuse_rag.engine.config import EngineConfig

Serving = Annotated[ServeOptions, tuple(name for name in declared_options(ServeOptions) if name != "token")]
WarmedModel = Annotated[EngineConfig, (*WORDING, "base")]
VerifiedModel = Annotated[EngineConfig, tuple(name for name in METHOD if name != "ratio")]

INTERRUPTED = 130  # exit code of a command that Ctrl-C stopped

app = typer.Typer(
    help="Answer RAG questions from stored caches. The flag --debug, at any position, shows the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="List and check models.", no_args_is_help=True)
warm_app = typer.Typer(help="Prefill documents into a store.", no_args_is_help=True)
app.add_typer(warm_app, name="warm")
app.add_typer(store_app, name="store")
app.add_typer(models_app, name="models")


@app.command()
@expand_options
def demo(config: LoadedModel, options: DemoOptions, as_json: Json = False) -> None:
    """Warm a small corpus, and answer questions by full prefill and over the reused caches, side by side."""
    _code("demo").run_demo(config, options, as_json=as_json)


@warm_app.command("run")
@expand_options
def warm_run(
    *, store: Library = LIBRARY, config: WarmedModel, corpus: CorpusOptions, job: JobOptions, as_json: Json = False
) -> None:
    """Split documents into passages, index them, and prefill each into the store; a second run adds or continues."""
    from qcfuse_rag.library.jobs import require_no_other_job

    require_no_other_job(store)  # before the imports, which take seconds
    _code("warm").run_warming(store, config, corpus, job, as_json=as_json)


@warm_app.command("plan")
@expand_options
def warm_plan(*, store: Library = LIBRARY, config: WarmedModel, corpus: CorpusOptions, as_json: Json = False) -> None:
    """Estimate the bytes and seconds that `warm run` would take, without storing anything."""
    _code("warm").plan_warming(store, config, corpus, as_json=as_json)


@warm_app.command("resume")
@expand_options
def warm_resume(
    *, store: Library = LIBRARY, options: Annotated[JobOptions, ("embedder", "ray")], as_json: Json = False
) -> None:
    """Continue the last warming job of a library with the same options."""
    from qcfuse_rag.library.jobs import require_no_other_job

    require_no_other_job(store)
    named = {"embedder": options.embedder, "ray": options.ray}
    _code("warm").resume_warming(store, named, as_json=as_json)


@warm_app.command("prefix")
@expand_options
def warm_prefix_command(
    *, store: Library = LIBRARY, config: WordedModel, options: PrefixOptions, as_json: Json = False
) -> None:
    """Prefill a system message and an agent's tools, so that no conversation has to compute them again."""
    _code("warm").warm_prefix(store, config, options, as_json=as_json)


@warm_app.command("status")
def warm_status(store: Library = LIBRARY, as_json: Json = False) -> None:
    """Show the progress of the last warming job of a library."""
    from qcfuse_rag.library.jobs import JobRecord

    record = JobRecord.load(store)
    state = record.actual_state
    lines = [f"{state}: {record.done_tokens:,} of {record.total_tokens:,} tokens"]
    if state == "running" and record.done_tokens:
        seconds_left = (record.total_tokens - record.done_tokens) / record.tokens_per_s
        lines.append(f"{record.tokens_per_s:,.0f} tokens per second, {duration(seconds_left)} left")
    if record.error:
        lines.append(record.error)
    if state not in ("running", "finished"):
        lines.append(f"continue the job with `qcfuse warm resume --store {store}`")
    print_result({**record.to_dict(), "state": state, "tokens_per_s": record.tokens_per_s}, as_json, *lines)


@app.command("serve")
@expand_options
def serve_command(
    *,
    store: Annotated[Path, typer.Option(help="Folder of a library or of a store.")] = LIBRARY,
    config: ModelAndMethod,
    options: Serving,
) -> None:
    """Serve OpenAI chat completions over a library; documents are retrieved here or come with each request."""
    _code("serve").serve_library(store, config, options)


@app.command("verify")
@expand_options
def verify_command(config: VerifiedModel, options: VerifyOptions, as_json: Json = False) -> None:
    """Find the smallest ratio at which answers are near full prefill's on your passages; exit with 1 if none passes."""
    if not _code("verify").run_verify(config, options, as_json=as_json):
        raise typer.Exit(1)


@app.command()
@expand_options
def ask(
    question: Question,
    *,
    store: Library = LIBRARY,
    config: ModelAndMethod,
    options: AskOptions,
    documents: Annotated[
        list[Path] | None, typer.Option(help="Folder or file to warm first, where it is not; may be repeated.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens to generate.")] = 128,
    explain: Annotated[Path | None, typer.Option(help="HTML page to write, which shows the recomputed tokens.")] = None,
    as_json: Json = False,
) -> None:
    """Answer a question over warmed documents and report which tokens were reused."""
    if not documents:
        _require_library(store)
    _code("ask").ask_library(
        question,
        store,
        config,
        options,
        documents=documents or (),
        max_new_tokens=max_new_tokens,
        explain=explain,
        as_json=as_json,
    )


@app.command()
@expand_options
def explain(
    question: Question,
    *,
    store: Library = LIBRARY,
    config: ModelAndMethod,
    options: AskOptions,
    out: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("explain.html"),
    as_json: Json = False,
) -> None:
    """Answer a question and write one HTML page that shows for every token of the prompt how it was computed."""
    _require_library(store)
    _code("ask").ask_library(question, store, config, options, explain=out, as_json=as_json)


@app.command()
@expand_options
def chat(
    *,
    store: Library = LIBRARY,
    config: ModelAndMethod,
    options: AskOptions,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 256,
) -> None:
    """Talk with a library: the model is loaded once, answers are streamed, and each names its sources."""
    _require_library(store)
    _code("ask").chat_with_library(store, config, options, max_new_tokens=max_new_tokens)


@app.command()
def methods(as_json: Json = False) -> None:
    """List the fusion methods and their parameters."""
    from qcfuse_rag.cli.describe import describe_methods, methods_table

    if as_json:
        print_json({"methods": describe_methods()})
    else:
        OUT.print(methods_table())


@models_app.command("list")
def models_list(as_json: Json = False) -> None:
    """List models for your own documents by their size and the memory that they take."""
    from qcfuse_rag.cli.describe import describe_models, models_table

    models = describe_models()
    if as_json:
        print_json({"models": models})
    else:
        OUT.print(models_table())
        print_line(f"use one: qcfuse warm run FOLDER --store library --model {models[0]['model']}")


@models_app.command("check")
@expand_options
def models_check(
    model: Annotated[str, typer.Argument(help="Hugging Face id, folder or GGUF file.")],
    config: Annotated[EngineConfig, ("device", "dtype", "weights")],
    as_json: Json = False,
) -> None:
    """Check on a few tokens whether reuse is exact for a model; exit with 1 if not."""
    report = _code("describe").check_model(replace(config, model=model))
    if as_json:
        print_json(report)
    else:
        _code("describe").print_model_check(report)
    if not report["supported"]:
        raise typer.Exit(1)


def _code(module: str) -> Any:
    """Import a module of commands without garbage collection, which would go through the objects of all modules.

    Later collections leave them out.
    """
    name = f"qcfuse_rag.cli.{module}"
    if "torch" in sys.modules:  # a program that imports models calls the command
        return import_module(name)
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def _require_library(folder: Path) -> None:
    """Refuse a library that does not exist, before the imports, which take seconds."""
    if not folder.is_dir():
        from qcfuse_rag.library.index import PassageIndex

        PassageIndex.load(folder / "passages")


def main() -> None:
    """Run the command line; an error is one line and exit code 1, with a traceback only under `--debug`."""
    quiet_libraries()
    try:
        app(args=[argument for argument in sys.argv[1:] if argument != "--debug"])
    except Exception as error:
        if shows_tracebacks():
            raise
        ERR.print(f"[red]error:[/red] {escape(with_full_stop(error_text(error)))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        ERR.print(_interruption())
        sys.exit(INTERRUPTED)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # the code with which Typer exits on Ctrl-C
            ERR.print(_interruption())
        raise
    finally:  # Python waits for threads now; Ctrl-C ends that without a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def run() -> NoReturn:
    """Run the command line as a program, and end it without freeing every object of torch, which takes seconds."""
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def _interruption() -> str:
    group = next((argument for argument in sys.argv[1:] if argument != "--debug"), None)
    return "interrupted; stored caches are kept" if group == "warm" else "interrupted"
