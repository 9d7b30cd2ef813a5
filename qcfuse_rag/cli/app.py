"""The `qcfuse` command: its subcommands, options and exit codes."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from qcfuse_rag.cli.bench import bench_app
from qcfuse_rag.cli.console import ERR, OUT, print_json, quiet_libraries, size
from qcfuse_rag.cli.store import store_app
from qcfuse_rag.errors import QCFuseError

INTERRUPTED = 130
"""The exit code of what Ctrl-C ended."""

app = typer.Typer(
    help="RAG answers without re-reading the library every time. With --debug anywhere, errors show a traceback.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="Look at models.", no_args_is_help=True)
warm_app = typer.Typer(help="Prefill documents into a store, once.", no_args_is_help=True)
app.add_typer(warm_app, name="warm")
app.add_typer(store_app, name="store")
app.add_typer(models_app, name="models")
app.add_typer(bench_app, name="bench")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Model = Annotated[str | None, typer.Option(help="Hugging Face id, folder or GGUF file; SmolLM2-135M if not given.")]
Library = Annotated[Path, typer.Option("--store", help="Folder of the library; its store is the folder kv in it.")]
Store = Annotated[Path, typer.Option(help="Folder of a library, or of a store.")]
EmbedderName = Annotated[str | None, typer.Option(help="sentence-transformers id or folder; MiniLM if not given.")]
MethodName = Annotated[str | None, typer.Option(help="See `qcfuse methods`; auto at 0.05 if not given.")]
Ratio = Annotated[float | None, typer.Option(help="Share of reused tokens to recompute, 0 to 1.")]
BaseName = Annotated[
    str | None, typer.Option(help="Stored how: framed, primed, blind, begun or enriched; as the method reads.")
]
WarmBase = Annotated[
    str | None,
    typer.Option(
        "--base", help="Caches to store: primed (if not given), blind, begun or enriched, and framed; or framed alone."
    ),
]
Device = Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; a GPU if there is one.")]
Dtype = Annotated[str | None, typer.Option(help="Such as bfloat16; float32 on a CPU.")]
Paths = Annotated[
    list[Path], typer.Argument(help="Text files, JSON lines, or folders of them; or what --reader reads.")
]
Reader = Annotated[str, typer.Option(help="files, llama-index (a persisted index), langchain (a dumped store).")]
MaxTokens = Annotated[int, typer.Option(min=16, help="Most tokens in a passage.")]
BatchTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens in one pass; 2048 on a CPU, 16384 on a GPU.")]
NumbersName = Annotated[str | None, typer.Option("--numbers", help="How to store: model (if not given), int8 or fp8.")]
LimitGB = Annotated[
    float | None, typer.Option(min=0.0, max=1e9, help="Most the store may take, in GB; 68.7 if never given.")
]
Tenant = Annotated[str | None, typer.Option(help="Whose entries; the secret is in QCFUSE_SECRET.")]
Access = Annotated[str | None, typer.Option(help="Tag of who may read these documents; '' is everybody.")]
Remote = Annotated[str | None, typer.Option(help="URL of a bucket or server behind the folder, which machines share.")]
Encrypt = Annotated[bool, typer.Option("--encrypt", help="Encrypt a new store; the secret is in QCFUSE_SECRET.")]


class Numbers(StrEnum):
    """How keys and values are stored."""

    MODEL = "model"
    INT8 = "int8"
    FP8 = "fp8"


@app.command()
def demo(
    model: Model = None,
    embedder: EmbedderName = None,
    store: Annotated[Path | None, typer.Option(help="Keep the store here; a temporary folder if not given.")] = None,
    question: Annotated[str | None, typer.Option(help="Ask this instead of the built-in question.")] = None,
    top_k: Annotated[int, typer.Option(min=1, help="Passages to retrieve.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Times to measure each method.")] = 5,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Ingest and warm a small corpus with LlamaIndex, ask a question, and compare methods side by side."""
    from qcfuse_rag.cli.demo import run_demo

    run_demo(model, embedder, store, question, top_k, repeats, device, dtype, as_json=as_json)


@warm_app.command("run")
def warm_run(
    paths: Paths,
    store: Library,
    reader: Reader = "files",
    model: Model = None,
    embedder: EmbedderName = None,
    base: WarmBase = None,
    max_tokens: MaxTokens = 384,
    batch_tokens: BatchTokens = None,
    numbers: NumbersName = None,
    limit_gb: LimitGB = None,
    tenant: Tenant = None,
    encrypt: Encrypt = False,
    access: Access = None,
    remote: Remote = None,
    ray: Annotated[str | None, typer.Option(help="Warm on this Ray cluster: auto, local, or an address.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Workers on Ray.")] = 2,
    cpus_per_worker: Annotated[float, typer.Option(min=0.0, help="Cores of each.")] = 1.0,
    gpus_per_worker: Annotated[float, typer.Option(min=0.0, help="GPUs of each.")] = 0.0,
    device: Device = None,
    dtype: Dtype = None,
    allow_empty: Annotated[
        bool, typer.Option("--allow-empty", help="Forget all of a folder that is empty now.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Split documents into passages, index them, and prefill each into the store; run again to add or go on."""
    from qcfuse_rag.cli.job import WarmOptions
    from qcfuse_rag.cli.warm import run_warming

    given = tuple(str(path) for path in paths)
    about = (reader, model, embedder, base, max_tokens, batch_tokens, numbers, limit_gb, tenant, encrypt, device, dtype)
    on_ray = (ray, workers, cpus_per_worker, gpus_per_worker)
    run_warming(store, WarmOptions(given, *about, access, remote, *on_ray, allow_empty), as_json=as_json)


@warm_app.command("plan")
def warm_plan(
    paths: Paths,
    store: Library,
    reader: Reader = "files",
    model: Model = None,
    base: WarmBase = None,
    max_tokens: MaxTokens = 384,
    batch_tokens: BatchTokens = None,
    numbers: NumbersName = None,
    limit_gb: LimitGB = None,
    tenant: Tenant = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Say how many bytes and seconds `warm run` would take; nothing is stored."""
    from qcfuse_rag.cli.job import WarmOptions
    from qcfuse_rag.cli.warm import plan_warming

    given = tuple(str(path) for path in paths)
    about = (reader, model, None, base, max_tokens, batch_tokens, numbers, limit_gb, tenant, False, device, dtype)
    plan_warming(store, WarmOptions(given, *about), as_json=as_json)


@warm_app.command("resume")
def warm_resume(store: Library, as_json: Json = False) -> None:
    """Go on with the last job of a store, with the options it had."""
    from qcfuse_rag.cli.warm import resume_warming

    resume_warming(store, as_json=as_json)


@warm_app.command("status")
def warm_status(store: Library, as_json: Json = False) -> None:
    """Say how far the last job of a store is."""
    from qcfuse_rag.cli.job import show_status

    show_status(store, as_json=as_json)


@app.command("serve")
def serve_command(
    store: Store,
    model: Model = None,
    name: Annotated[str | None, typer.Option(help="Its name to clients; the last part of --model if none.")] = None,
    host: Annotated[str, typer.Option(help="Beyond loopback, QCFUSE_TOKEN has to be set.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where to listen.")] = 8000,
    method: MethodName = None,
    ratio: Ratio = None,
    base: BaseName = None,
    waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait; one more is refused with 429.")] = 64,
    most_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 4096,
    remote: Remote = None,
    ray: Annotated[str | None, typer.Option(help="Serve on this Ray cluster: auto, local, or an address.")] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas on Ray; the fewest, if --most-replicas is given.")] = 2,
    most_replicas: Annotated[int | None, typer.Option(min=1, help="Let Ray start as many when they are busy.")] = None,
    cpus_per_replica: Annotated[float, typer.Option(min=0.0, help="Cores of each.")] = 1.0,
    gpus_per_replica: Annotated[float, typer.Option(min=0.0, help="GPUs of each.")] = 0.0,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Answer OpenAI's chat completions over a library, with documents in a field of their own."""
    from qcfuse_rag.cli.serve import ServeOptions, serve_library
    from qcfuse_rag.methods import choose_method

    here = (model, name, host, port, remote, waiting, most_tokens, device, dtype)
    on_ray = (ray, replicas, most_replicas, cpus_per_replica, gpus_per_replica)
    serve_library(store, choose_method(method, ratio=ratio, base=base), ServeOptions(*here, *on_ray))


@app.command("plan")
def plan_command(
    nodes: Annotated[int, typer.Option(min=1, help="Passages in the corpus.")],
    model: Annotated[str, typer.Option(help="A shape of `bench speed`, such as qwen3-8b, a folder or an id.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a passage.")] = 384,
    gpu: Annotated[str, typer.Option(help="a100, l40s, h100, h200, b200, or here, which measures.")] = "h200",
    retrieved: Annotated[int, typer.Option(min=1, help="Passages of a request.")] = 10,
    ratio: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of their tokens to recompute.")] = 0.05,
    numbers: Annotated[Numbers, typer.Option(help="How keys and values are stored.")] = Numbers.MODEL,
    reached: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of a data sheet's rates to assume.")] = 0.5,
    caches: Annotated[int, typer.Option(min=1, help="Caches kept of each passage; the default method keeps two.")] = 2,
    as_json: Json = False,
) -> None:
    """Say what a corpus would take: bytes, hours, uses until it pays, and the first token from each tier."""
    from qcfuse_rag.cli.plan import plan_corpus

    plan_corpus(nodes, tokens, model, gpu, retrieved, ratio, numbers.value, reached, caches, as_json=as_json)


@app.command("verify")
def verify_command(
    model: Model = None,
    store: Annotated[
        Path | None, typer.Option(help="Folder of a library, whose passages are used, or of a store; gets the verdict.")
    ] = None,
    method: MethodName = None,
    ratio: Ratio = None,
    base: BaseName = None,
    size: Annotated[int, typer.Option(min=1, help="Prompts of each of three kinds.")] = 8,
    tokens: Annotated[int, typer.Option(min=512, help="Length of the prompts with something hidden.")] = 1024,
    kl: Annotated[float, typer.Option(min=0.0, help="Most mean divergence from full prefill, in nats.")] = 0.25,
    agreement: Annotated[float, typer.Option(min=0.0, max=1.0, help="Least share of equal first tokens.")] = 0.75,
    loss: Annotated[float, typer.Option(min=0.0, max=1.0, help="Most share of hidden answers lost.")] = 0.1,
    tenant: Tenant = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Compare a method with full prefill on your model and passages; exits with 1 if it does not pass."""
    from qcfuse_rag.cli.verify import run_verify
    from qcfuse_rag.methods import choose_method
    from qcfuse_rag.verification.checks import Limits

    chosen = choose_method(method, ratio=ratio, base=base)
    limits = Limits(kl, agreement, loss)
    if not run_verify(model, store, chosen, size, tokens, limits, device, dtype, tenant, as_json=as_json):
        raise typer.Exit(1)


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    store: Library,
    model: Model = None,
    embedder: EmbedderName = None,
    method: MethodName = None,
    ratio: Ratio = None,
    base: BaseName = None,
    top_k: Annotated[int, typer.Option(min=0, help="Passages to retrieve.")] = 6,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
    explain: Annotated[Path | None, typer.Option(help="Write a page that shows which tokens were recomputed.")] = None,
    tenant: Tenant = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Answer a question over warmed documents and say what was reused."""
    from qcfuse_rag.cli.ask import ask_library
    from qcfuse_rag.methods import choose_method

    ask_library(
        question,
        store,
        model,
        embedder,
        choose_method(method, ratio=ratio, base=base),
        top_k,
        max_new_tokens,
        explain,
        device,
        dtype,
        tenant,
        as_json=as_json,
    )


@app.command()
def explain(
    question: Annotated[str, typer.Argument(help="The question.")],
    store: Library,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("explain.html"),
    model: Model = None,
    embedder: EmbedderName = None,
    method: MethodName = None,
    ratio: Ratio = None,
    base: BaseName = None,
    top_k: Annotated[int, typer.Option(min=0, help="Passages to retrieve.")] = 6,
    tenant: Tenant = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Answer a question and draw what became of every word of its prompt, as one page that can be sent around."""
    how = (model, embedder, method, ratio, base, top_k, 128, out, tenant, device, dtype)
    ask(question, store, *how, as_json=as_json)


@app.command()
def profile(
    model: Model = None,
    data: Annotated[Path | None, typer.Option(help="JSON lines of questions; the demo's own if not given.")] = None,
    questions: Annotated[int | None, typer.Option("--size", min=1, help="Questions to use; all if not given.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers to choose.")] = 3,
    depth_penalty: Annotated[float, typer.Option(min=0.0, help="Taken off the recall of deep layers.")] = 0.0,
    unlabelled: Annotated[bool, typer.Option("--unlabelled", help="Do without answers: leave passages out.")] = False,
    distractors: Annotated[int | None, typer.Option(min=0, help="Passages beside those needed; all of a file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the profile here.")] = None,
    store: Annotated[
        Path | None, typer.Option(help="Of a library or a store; the profile is kept there, for methods that read it.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the layers into this image.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Find a model's critical layers: those in which questions look at their answers."""
    from qcfuse_rag.cli.profile import ProfileOptions, run_profile

    about = (data, questions, layers, depth_penalty, unlabelled, distractors, out, store, plot, device, dtype)
    run_profile(ProfileOptions(model, *about), as_json=as_json)


@app.command()
def methods(as_json: Json = False) -> None:
    """List methods and their parameters."""
    from qcfuse_rag.cli.tables import describe_methods, methods_table

    if as_json:
        print_json({"methods": describe_methods()})
    else:
        OUT.print(methods_table())


@models_app.command("check")
def models_check(
    model: Annotated[str, typer.Argument(help="Hugging Face id, folder or GGUF file.")],
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Say whether reuse is right for a model, and prove it on a few tokens; exits with 1 if not."""
    from qcfuse_rag.cli.tables import check_model

    report = check_model(model, device, dtype)
    if as_json:
        print_json(report)
    elif report["supported"]:
        OUT.print(f"[green]supported[/green]: {report['architecture']}, {report['layers']} layers, {report['dtype']}")
        OUT.print(f"  positions: {'; '.join(report['rope'])}")
        OUT.print(f"  context window: {report['context_window']:,} tokens ({report['context_window_reason']})")
        OUT.print(f"  stored size: {size(report['kv_bytes_per_token'])} a token")
        OUT.print(f"  kernels: {report['kernels']}; full prefill attends by {report['full_prefill_attention']}")
        OUT.print(f"  all rows against the model's own forward: {report['check']['all_rows']:.2g}")
        OUT.print(f"  reused rows against caches computed in place: {report['check']['question_rows']:.2g}")
        OUT.print(f"  a decode step against the plain forward: {report['check']['step']:.2g}")
        OUT.print(f"  (largest logit difference in standard deviations; allowed {report['check']['tolerance']:g})")
    else:
        ERR.print(f"[red]not supported[/red]: {escape(report['reason'])}", highlight=False)
    if not report["supported"]:
        raise typer.Exit(1)


def main() -> None:
    """Run the command line: errors are one line and exit code 1, tracebacks only with `--debug`."""
    quiet_libraries()
    debug = "--debug" in sys.argv
    try:
        app(args=[argument for argument in sys.argv[1:] if argument != "--debug"])
    except Exception as error:
        if debug:
            raise
        known = isinstance(error, (QCFuseError, ValueError, OSError))
        text = str(error) if known else f"{type(error).__name__}: {error} (--debug shows where)"
        ERR.print(f"[red]error:[/red] {escape(text)}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        ERR.print("interrupted; what was stored is kept")
        sys.exit(INTERRUPTED)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # which is what typer makes of Ctrl-C
            ERR.print("interrupted; what was stored is kept")
        raise
