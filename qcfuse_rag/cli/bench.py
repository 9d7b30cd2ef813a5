"""`qcfuse bench ...`: measure this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qcfuse_rag.cli.console import OUT, print_json, progress_bar, status

bench_app = typer.Typer(help="Measure this machine.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
ModelName = Annotated[str | None, typer.Option("--model", help="Hugging Face id, folder or GGUF file; SmolLM2-135M.")]
DeviceName = Annotated[str | None, typer.Option("--device", help="Such as cpu or cuda:0; a GPU if there is one.")]
DtypeName = Annotated[str | None, typer.Option("--dtype", help="Such as bfloat16; float32 on a CPU.")]
Repeats = Annotated[int, typer.Option(min=1, help="Rounds of each measurement.")]


@bench_app.command("store")
def bench_store(
    folder: Annotated[Path | None, typer.Option(help="Measure the disk this is on; that of temporary files.")] = None,
    megabytes: Annotated[int, typer.Option("--mb", min=1, help="Bytes of entries for each size of entry.")] = 512,
    repeats: Repeats = 5,
    as_json: Json = False,
) -> None:
    """Compare writing and reading entries with the same bytes without a store, with 1 to 8 threads."""
    from qcfuse_rag.evaluation.speed.store import measure_store

    with status("measuring"):
        found = measure_store(folder, megabytes=megabytes, repeats=repeats)
    if as_json:
        print_json(found.to_dict())
    else:
        OUT.print(found.table())


@bench_app.command("warm")
def bench_warm(
    model: ModelName = None,
    chunks: Annotated[int, typer.Option(min=1, help="Passages of mixed lengths.")] = 40,
    repeats: Repeats = 3,
    batch_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens in one pass.")] = None,
    device: DeviceName = None,
    dtype: DtypeName = None,
    as_json: Json = False,
) -> None:
    """Compare a warming job with the bare forward passes of the same passages."""
    from qcfuse_rag.bundled import default_model
    from qcfuse_rag.evaluation.speed.warming import measure_warming
    from qcfuse_rag.runtime.language_model import LanguageModel

    with status("measuring"):
        lm = LanguageModel.load(model or default_model(), device=device, dtype=dtype)
        found = measure_warming(lm, chunks=chunks, repeats=repeats, batch_tokens=batch_tokens)
    if as_json:
        print_json(found.to_dict())
    else:
        OUT.print(found.table())


@bench_app.command("speed")
def bench_speed(
    model: ModelName = None,
    shape: Annotated[
        str | None, typer.Option(help="Random weights instead: qwen3-8b, llama-3.1-8b, qwen3-32b, ...")
    ] = None,
    context: Annotated[str, typer.Option(help="Tokens of passages, with commas.")] = "4096",
    methods: Annotated[str, typer.Option(help=r"With commas; parameters as epic\[n_tokens=16].")] = "auto",
    ratios: Annotated[str, typer.Option(help="Shares to recompute, with commas.")] = "0.05,0.1,0.2",
    tiers: Annotated[
        str,
        typer.Option(
            help="Of memory, device, pinned, disk, throttled; if not given memory,disk, on a GPU pinned,device,disk."
        ),
    ] = "",
    numbers: Annotated[str, typer.Option(help="Passages kept as model, int8, fp8; with commas.")] = "model",
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a passage.")] = 512,
    requests: Annotated[str, typer.Option(help="Requests to decode together, with commas.")] = "1,4,8",
    throttle_mb: Annotated[float, typer.Option(min=0.001, help="Megabytes a second of the throttled tier.")] = 1000,
    folder: Annotated[Path | None, typer.Option(help="Measure the disk this is on; that of temporary files.")] = None,
    repeats: Repeats = 5,
    out: Annotated[Path | None, typer.Option(help="Write JSON here, Markdown and a picture beside it.")] = None,
    device: DeviceName = None,
    dtype: DtypeName = None,
    as_json: Json = False,
) -> None:
    """Compare time to first token and decoding with transformers' own and with what the machine could do at most."""
    from qcfuse_rag.cli.bench_speed import run_speed
    from qcfuse_rag.evaluation.quality.configurations import configurations, split_names
    from qcfuse_rag.evaluation.speed.measure import SpeedOptions
    from qcfuse_rag.evaluation.speed.tables import terminal_tables

    chosen = configurations(split_names(methods), _shares(ratios))
    options = SpeedOptions(
        contexts=tuple(int(one) for one in split_names(context)),
        methods=tuple(chosen[1:]),
        tiers=tuple(split_names(tiers)),
        numbers=tuple(split_names(numbers)) or ("model",),
        chunk=chunk,
        repeats=repeats,
        requests=tuple(int(one) for one in split_names(requests)),
        throttle=1e6 * throttle_mb,
        folder=folder,
    )
    found = run_speed(model, shape, options, device, dtype, out)
    if as_json:
        print_json(found)
        return
    for table in terminal_tables(found, OUT.width):
        OUT.print(table)
    if out is not None:
        missing = found["about"].get("no_picture")
        written = [str(out.with_suffix(ending)) for ending in (out.suffix, ".md", *([] if missing else [".png"]))]
        OUT.print(f"written: {', '.join(written)}", highlight=False, markup=False, soft_wrap=True)
        if missing:
            OUT.print(f"no picture: {missing}", highlight=False, markup=False, soft_wrap=True)


@bench_app.command("quality")
def bench_quality(
    data_dir: Annotated[
        Path, typer.Option(help="Folder of files DATASET.jsonl, in lines as `qcfuse profile --data` reads them.")
    ],
    dataset: Annotated[list[str], typer.Option(help="Name, or several with commas; ruler_mv, ruler_mq, ruler_vt.")],
    out: Annotated[Path, typer.Option("--json", help="File of the result; table, plots and records go beside it.")],
    model: ModelName = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(help=r"With commas, beside full; parameters as epic\[n_tokens=16]; auto if none is named."),
    ] = None,
    baseline: Annotated[list[str] | None, typer.Option(help="Methods by the names of the QCFuse release.")] = None,
    ratios: Annotated[str | None, typer.Option(help="Shares to recompute, with commas; each method's own.")] = None,
    bases: Annotated[
        str | None, typer.Option(help="Of blind, framed, primed, begun, enriched; each method's own.")
    ] = None,
    size: Annotated[int, typer.Option(min=1, help="Questions of each dataset.")] = 100,
    distractors: Annotated[int | None, typer.Option(min=0, help="Passages beside those with the answer; all.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="First passages to keep; all.")] = None,
    seed: Annotated[int, typer.Option(help="Of generated tasks and of intervals.")] = 0,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Of answers; 32, and RULER's own.")] = None,
    ruler_tokens: Annotated[int, typer.Option(min=64, help="Length of generated tasks.")] = 2048,
    group: Annotated[int, typer.Option(min=1, help="Questions to keep passages of in memory.")] = 20,
    pool: Annotated[
        list[Path] | None, typer.Option(help="JSON lines to find enriched passages' neighbours in.")
    ] = None,
    neighbours: Annotated[int, typer.Option(min=1, help="Neighbours of an enriched passage.")] = 10,
    store: Annotated[Path | None, typer.Option(help="Folder to keep passages in; memory.")] = None,
    profile: Annotated[Path | None, typer.Option(help="From `qcfuse profile`; the one in the store's folder.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder of the plots; beside the result.")] = None,
    device: DeviceName = None,
    dtype: DtypeName = None,
) -> None:
    """Compare answers of methods with full prefill's on the same questions and tokens; run again to go on or add."""
    from qcfuse_rag.bundled import default_model
    from qcfuse_rag.evaluation.quality.configurations import split_names
    from qcfuse_rag.evaluation.quality.measure import QualityOptions, measure_quality
    from qcfuse_rag.evaluation.quality.plots import draw
    from qcfuse_rag.evaluation.quality.tables import LEGEND, terminal_tables

    options = QualityOptions(
        model=model or default_model(),
        data_dir=data_dir,
        datasets=tuple(split_names(",".join(dataset))),
        methods=tuple(split_names(",".join([*(methods or ()), *(baseline or ())]))) or ("auto",),
        out=out,
        ratios=_shares(ratios or ""),
        bases=tuple(split_names(bases or "")),
        size=size,
        distractors=distractors,
        top_k=top_k,
        seed=seed,
        max_new_tokens=max_new_tokens,
        ruler_tokens=ruler_tokens,
        group=group,
        pool=tuple(pool or ()),
        neighbours=neighbours,
        store=store,
        device=device,
        dtype=dtype,
        profile=profile,
    )
    with progress_bar("asking", "questions") as advance:
        found = measure_quality(options, advance)
    drawn = draw(found["summary"], plots or out.parent, out.stem)
    for table in terminal_tables(found["summary"], OUT.width):
        OUT.print(table)
    OUT.print(LEGEND, highlight=False, markup=False)
    for note in found["about"]["notes"]:
        OUT.print(note, highlight=False, markup=False)
    written = [out, out.with_suffix(".md"), *drawn]
    OUT.print("written: " + ", ".join(map(str, written)), highlight=False, markup=False, soft_wrap=True)


def _shares(given: str) -> tuple[float, ...]:
    from qcfuse_rag.evaluation.quality.configurations import split_names

    try:
        return tuple(float(share) for share in split_names(given))
    except ValueError:
        raise typer.BadParameter(f"{given!r} is no list of numbers such as 0.05,0.2", param_hint="--ratios") from None
