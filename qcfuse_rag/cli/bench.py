"""`qcfuse bench`: measure this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from typer import Option

from qcfuse_rag.bundled import default_model
from qcfuse_rag.cli.console import OUT, duration, print_json, print_line, progress_bar, size, status
from qcfuse_rag.cli.options import Json, ModelOptions, WeightsChoice, expand_options
from qcfuse_rag.errors import QCFuseError

if TYPE_CHECKING:
    from qcfuse_rag.runtime.language_model import LanguageModel

bench_app = typer.Typer(help="Measure this machine.", no_args_is_help=True)

Repeats = Annotated[int, Option(min=1, help="Rounds of each measurement.")]
DiskFolder = Annotated[Path | None, Option(help="Folder on the disk to measure; by default that of temporary files.")]


@bench_app.command("store")
def bench_store(
    folder: DiskFolder = None,
    megabytes: Annotated[int, Option("--mb", min=1, help="Megabytes of entries for each size of entry.")] = 512,
    repeats: Repeats = 5,
    as_json: Json = False,
) -> None:
    """Compare writing and reading entries with plain files of the same bytes, with 1 to 8 threads."""
    from qcfuse_rag.evaluation.speed.store import measure_store

    with status("measuring"):
        result = measure_store(folder, megabytes=megabytes, repeats=repeats)
    if as_json:
        print_json(result)
    else:
        OUT.print(store_table(result))


@bench_app.command("warm")
@expand_options
def bench_warm(
    options: ModelOptions,
    chunks: Annotated[int, Option(min=1, help="Number of passages, of mixed lengths.")] = 40,
    repeats: Repeats = 3,
    batch_tokens: Annotated[int | None, Option(min=1, help="Maximum tokens in one pass.")] = None,
    as_json: Json = False,
) -> None:
    """Compare a warming job with the bare forward passes of the same passages."""
    from qcfuse_rag.evaluation.speed.warming import measure_warming

    with status("measuring"):
        lm = _load(options)
        result = measure_warming(lm, chunks=chunks, repeats=repeats, batch_tokens=batch_tokens)
    if as_json:
        print_json(result)
    else:
        OUT.print(warming_table(result))


@bench_app.command("speed")
@expand_options
def bench_speed(
    options: ModelOptions,
    shape: Annotated[
        str | None, Option(help="Model shape with random weights, instead of a model: qwen3-8b, llama-3.1-8b, ...")
    ] = None,
    context: Annotated[str, Option(help="Numbers of passage tokens, with commas.")] = "4096",
    methods: Annotated[str, Option(help=r"Methods, with commas; parameters as epic\[n_tokens=16].")] = "auto",
    ratios: Annotated[str, Option(help="Shares to recompute, with commas.")] = "0.05,0.1,0.2",
    tiers: Annotated[
        str,
        Option(
            help="Storage tiers: memory, device, pinned, disk, throttled; "
            "by default memory,disk and on a GPU pinned,device,disk."
        ),
    ] = "",
    numbers: Annotated[str, Option(help="Number formats of stored passages: model, int8, fp8; with commas.")] = "model",
    chunk: Annotated[int, Option(min=1, help="Tokens of a passage.")] = 512,
    requests: Annotated[str, Option(help="Batch sizes to decode, with commas.")] = "1,4,8",
    throttle_mb: Annotated[float, Option(min=0.001, help="Megabytes a second of the throttled tier.")] = 1000,
    folder: DiskFolder = None,
    repeats: Repeats = 5,
    out: Annotated[Path | None, Option(help="JSON file to write; Markdown and a picture go beside it.")] = None,
    as_json: Json = False,
) -> None:
    """Compare time to first token and decoding with transformers and with the limits of the machine."""
    from qcfuse_rag.evaluation.quality.configurations import configurations, split_names
    from qcfuse_rag.evaluation.speed.measure import SpeedOptions, run_speed
    from qcfuse_rag.evaluation.speed.shapes import random_model
    from qcfuse_rag.evaluation.speed.tables import terminal_tables

    if options.model is not None and shape is not None:
        raise QCFuseError("give a --model or a --shape, not both")
    speed_options = SpeedOptions(
        contexts=tuple(map(int, split_names(context))),
        methods=tuple(configurations(split_names(methods), _shares(ratios))[1:]),
        tiers=tuple(split_names(tiers)),
        numbers=tuple(split_names(numbers)) or ("model",),
        chunk=chunk,
        repeats=repeats,
        requests=tuple(map(int, split_names(requests))),
        throttle=1e6 * throttle_mb,
        folder=folder,
    )
    lm = _load(options) if shape is None else random_model(shape, device=options.device, dtype=options.dtype)
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


@bench_app.command("peer")
def bench_peer(
    model: Annotated[Path | None, Option(help="GGUF file of the model; by default SmolLM2-135M.")] = None,
    context: Annotated[
        int, Option(min=64, help="Tokens of the passages, which are documents of the demonstration.")
    ] = 2048,
    methods: Annotated[str, Option(help="Methods beside full prefill, with commas.")] = "auto",
    ratios: Annotated[str, Option(help="Shares to recompute, with commas.")] = "0.05",
    answers: Annotated[str, Option(help="Lengths of the answers in tokens, with commas.")] = "32,128,512",
    weights: Annotated[WeightsChoice, Option(help="Format of this engine's weights.")] = WeightsChoice.AUTO,
    repeats: Repeats = 3,
    as_json: Json = False,
) -> None:
    """Compare whole answers on a CPU with llama.cpp, on the same GGUF file, tokens and threads."""
    from qcfuse_rag.evaluation.quality.configurations import configurations, split_names
    from qcfuse_rag.evaluation.speed.peer import PeerOptions, compare_peer, peer_table

    options = PeerOptions(
        gguf=model or Path(default_model()),
        methods=tuple(configurations(split_names(methods), _shares(ratios))),
        context=context,
        answers=tuple(map(int, split_names(answers))),
        repeats=repeats,
        weights=weights.value,
    )
    with progress_bar("answering", "lengths") as advance:
        result = compare_peer(options, advance)
    if as_json:
        print_json(result)
    else:
        OUT.print(peer_table(result))


@bench_app.command("quality")
@expand_options
def bench_quality(
    options: ModelOptions,
    data_dir: Annotated[
        Path,
        Option(
            help="Folder of files DATASET.jsonl; each line is an object with `question`, `passages` (texts, or objects "
            "with `title` and `text`) and `answers` (texts), and perhaps `supporting` (indices of the passages with "
            "the answer) and `id`. The layouts of LongBench and of the QCFuse release are read too."
        ),
    ],
    dataset: Annotated[
        list[str], Option(help="Dataset, or several with commas; ruler_mv, ruler_mq and ruler_vt are generated.")
    ],
    out: Annotated[Path, Option("--json", help="JSON file to write; table, plots and records go beside it.")],
    methods: Annotated[
        list[str] | None,
        Option(help=r"Methods beside full prefill, with commas; parameters as epic\[n_tokens=16]; auto by default."),
    ] = None,
    baseline: Annotated[list[str] | None, Option(help="Methods by their names in the QCFuse release.")] = None,
    ratios: Annotated[
        str | None, Option(help="Shares to recompute, with commas; by default each method's own.")
    ] = None,
    bases: Annotated[
        str | None, Option(help="Stored caches: blind, framed, primed, begun, enriched; by default each method's own.")
    ] = None,
    size: Annotated[int, Option(min=1, help="Questions of each dataset.")] = 100,
    distractors: Annotated[
        int | None, Option(min=0, help="Passages beside those with the answer; all by default.")
    ] = None,
    top_k: Annotated[int | None, Option(min=1, help="Number of first passages to keep; all by default.")] = None,
    seed: Annotated[int, Option(help="Seed of generated tasks and of intervals.")] = 0,
    max_new_tokens: Annotated[
        int | None, Option(min=1, help="Maximum tokens of an answer; by default 32, in RULER tasks their own.")
    ] = None,
    ruler_tokens: Annotated[int, Option(min=64, help="Length of generated tasks.")] = 2048,
    group: Annotated[int, Option(min=1, help="Number of questions whose passages are in memory together.")] = 20,
    pool: Annotated[
        list[Path] | None, Option(help="JSON lines file to search the neighbours of enriched passages in.")
    ] = None,
    neighbours: Annotated[int, Option(min=1, help="Neighbours of an enriched passage.")] = 10,
    store: Annotated[Path | None, Option(help="Folder to keep passages in; memory by default.")] = None,
    profile: Annotated[
        Path | None, Option(help="Profile from `qcfuse profile`; by default the one in the store's folder.")
    ] = None,
    plots: Annotated[Path | None, Option(help="Folder of the plots; by default that of the result.")] = None,
) -> None:
    """Compare the answers of methods with full prefill on the same questions and tokens; a second run continues."""
    from qcfuse_rag.evaluation.quality.configurations import split_names
    from qcfuse_rag.evaluation.quality.measure import QualityOptions, measure_quality
    from qcfuse_rag.evaluation.quality.tables import LEGEND, draw, terminal_tables

    quality_options = QualityOptions(
        model=options.model or default_model(),
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
        device=options.device,
        dtype=options.dtype,
        weights=options.weight_format,
        profile=profile,
    )
    with progress_bar("asking", "questions") as advance:
        result = measure_quality(quality_options, advance)
    drawn = draw(result["summary"], plots or out.parent, out.stem)
    for table in terminal_tables(result["summary"], OUT.width):
        OUT.print(table)
    for line in (LEGEND, *result["about"]["notes"]):
        OUT.print(line, highlight=False, markup=False)
    print_line("written: " + ", ".join(map(str, [out, out.with_suffix(".md"), *drawn])))


def store_table(result: Mapping[str, Any]) -> Table:
    """Return the rates of a store as a table."""
    columns = ("entry", "what", "threads", "store MB/s", "bare MB/s", "ratio", "bare, recycled", "ratio")
    table = Table(*columns, title=f"A store in {escape(result['folder'])}, medians of {result['repeats']}")
    for rate in result["rates"]:
        row = [size(rate["entry_bytes"]), rate["what"], str(rate["threads"]), f"{rate['store_mb_s']:,.0f}"]
        row += [f"{rate['bare_mb_s']:,.0f}", f"{rate['ratio']:.2f}"]
        if rate["recycled_mb_s"] is not None:
            row += [f"{rate['recycled_mb_s']:,.0f}", f"{rate['recycled_ratio']:.2f}"]
        table.add_row(*row)
    return table


def warming_table(result: Mapping[str, Any]) -> Table:
    """Return the rates of a warming job as a table."""
    table = Table("", "seconds", "tokens a second", title=f"{result['chunks']} chunks, {result['tokens']:,} tokens")
    for name, side in (("bare forward passes", "bare_s"), ("warming job", "job_s")):
        middle = median(result[side])
        table.add_row(name, duration(middle), f"{result['tokens'] / middle:,.0f}")
    table.add_row("ratio", f"{result['ratio']:.2f}", "")
    return table


def _load(options: ModelOptions) -> LanguageModel:
    from qcfuse_rag.runtime.language_model import LanguageModel

    return LanguageModel.load(
        options.model or default_model(), device=options.device, dtype=options.dtype, weights=options.weight_format
    )


def _shares(text: str) -> tuple[float, ...]:
    from qcfuse_rag.evaluation.quality.configurations import split_names

    try:
        return tuple(float(share) for share in split_names(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of numbers such as 0.05,0.2", param_hint="--ratios") from None
