"""Time a warming job beside the forward passes that it is made of."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import torch
from typer import Option

from benchmarks.floors import seconds
from benchmarks.options import ModelOptions, Repeats
from benchmarks.runner import Record, Report, Run, Table, about_model, machine_conditions
from qcfuse_rag.bundled import corpus
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.ingestion.batches import batches_by_length
from qcfuse_rag.ingestion.warm_job import BATCH_TOKENS
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.disk import DiskStore
from qcfuse_rag.store.key import FRAMED
from qcfuse_rag.verification.exactness import stock_attention

LENGTHS = (37, 380, 64, 256, 120, 300, 90, 180, 48, 220)  # tokens of the passages, in turn


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Options of the measurement."""

    chunks: Annotated[int, Option(min=1, help="Number of passages, of mixed lengths.")] = 40
    repeats: Repeats = 3
    batch_tokens: Annotated[int | None, Option(min=1, help="Maximum tokens in one pass.")] = None


def measure(options: Options, run: Run) -> None:
    """Time a job over passages of mixed lengths of the demonstration, in turns with bare forward passes.

    The bare passes get batches as well packed as the job's, keep no cache and write nothing. The job prefills after the
    system prefix, ranks tokens, and writes to a folder, all forced to disk.
    """
    lm = options.load_model()
    ids = lm.tokenizer(" ".join(corpus().values()), add_special_tokens=False)["input_ids"]
    passages: list[tuple[int, ...]] = []
    start = 0
    for number in range(options.chunks):
        length = LENGTHS[number % len(LENGTHS)]
        passages.append(tuple(ids[(start + i) % len(ids)] for i in range(length)))
        start += length
    bound = options.batch_tokens or BATCH_TOKENS.get(lm.device.type, BATCH_TOKENS["cuda"])
    sizes = {"chunks": options.chunks, "tokens": sum(map(len, passages)), "batch_tokens": bound}
    run.begin({**about_model(lm), **sizes}, {**machine_conditions(lm), **sizes})

    def job() -> Record:
        with tempfile.TemporaryDirectory() as folder, DiskStore(folder) as store:
            summary = FusionEngine(lm, store).corpus.warm_job(passages, bases=(FRAMED,), batch_tokens=bound).run()
            return {"seconds": summary.elapsed_s, "computed": summary.computed_tokens}

    def bare() -> Record:
        return {"seconds": seconds(lm, lambda: _forward_passes(lm, passages, bound))}

    run.take_turns((), {("bare forward passes",): bare, ("warming job",): job}, options.repeats)


def report(run: Run) -> Report:
    """Return both throughputs; their ratio is the median of the pairs."""
    sides = {name: dict(run.of(name)) for name in ("bare forward passes", "warming job")}
    tokens = run.about["tokens"]
    rows = []
    for name, records in sides.items():
        if records:
            middle = median(record["seconds"] for record in records.values())
            rows.append([name, f"{middle:.3g} s", f"{tokens / middle:,.0f}"])
    bare, job = sides.values()
    pairs = [bare[turn]["seconds"] / job[turn]["seconds"] for turn in job if turn in bare]
    summary = {
        "bare_s": [record["seconds"] for record in bare.values()],
        "job_s": [record["seconds"] for record in job.values()],
        "throughput_to_bare": median(pairs) if pairs else None,
        "computed_share": max((record["computed"] / tokens for record in job.values()), default=None),
    }
    if pairs:
        rows.append(["job / bare", f"{median(pairs):.2f}", ""])
    title = f"{run.about['chunks']} chunks, {tokens:,} tokens"
    return Report(summary, [Table(title, ("side", "time", "tokens a second"), rows)])


@torch.inference_mode()
def _forward_passes(lm: LanguageModel, passages: list[tuple[int, ...]], bound: int) -> None:
    with stock_attention(lm):
        for batch in batches_by_length(passages, len, batch_tokens=bound):
            longest = max(map(len, batch))
            ids = torch.tensor([(*passage, *(0 for _ in range(longest - len(passage)))) for passage in batch])
            lm.model(input_ids=ids.to(lm.device), use_cache=True, logits_to_keep=1)
