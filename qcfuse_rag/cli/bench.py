"""`qcfuse bench ...`: measure this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qcfuse_rag.cli.console import OUT, print_json, status

bench_app = typer.Typer(help="Measure this machine.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Repeats = Annotated[int, typer.Option(min=1, help="Rounds of each measurement.")]


@bench_app.command("store")
def bench_store(
    folder: Annotated[Path | None, typer.Option(help="Measure the disk this is on; that of temporary files.")] = None,
    megabytes: Annotated[int, typer.Option("--mb", min=1, help="Bytes of entries for each size of entry.")] = 512,
    repeats: Repeats = 5,
    as_json: Json = False,
) -> None:
    """Compare writing and reading entries with the same bytes without a store, with 1 to 8 threads."""
    from qcfuse_rag.cli.bench_store import measure_store

    with status("measuring"):
        found = measure_store(folder, megabytes=megabytes, repeats=repeats)
    if as_json:
        print_json(found.to_dict())
    else:
        OUT.print(found.table())


@bench_app.command("warm")
def bench_warm(
    model: Annotated[str | None, typer.Option(help="Hugging Face id, folder or GGUF file; SmolLM2-135M.")] = None,
    chunks: Annotated[int, typer.Option(min=1, help="Passages of mixed lengths.")] = 40,
    repeats: Repeats = 3,
    batch_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens in one pass.")] = None,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; a GPU if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Such as bfloat16; float32 on a CPU.")] = None,
    as_json: Json = False,
) -> None:
    """Compare a warming job with the bare forward passes of the same passages."""
    from qcfuse_rag.cli.bench_warm import measure_warming
    from qcfuse_rag.demo.assets import default_model
    from qcfuse_rag.model.language_model import LanguageModel

    with status("measuring"):
        lm = LanguageModel.load(model or default_model(), device=device, dtype=dtype)
        found = measure_warming(lm, chunks=chunks, repeats=repeats, batch_tokens=batch_tokens)
    if as_json:
        print_json(found.to_dict())
    else:
        OUT.print(found.table())
