"""Time a warming job beside the forward passes that it is made of."""

from __future__ import annotations

import tempfile
from statistics import median
from typing import Any

import torch

from benchmarks.speed.ceilings import seconds
from qcfuse_rag.bundled import corpus
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.ingestion.batches import batches_by_length
from qcfuse_rag.ingestion.warm_job import BATCH_TOKENS
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.disk import DiskStore
from qcfuse_rag.store.prefill_base import FRAMED
from qcfuse_rag.verification.exactness import stock_attention

LENGTHS = (37, 380, 64, 256, 120, 300, 90, 180, 48, 220)  # tokens of the passages, in turn


def measure_warming(
    lm: LanguageModel, *, chunks: int = 40, repeats: int = 3, batch_tokens: int | None = None
) -> dict[str, Any]:
    """Time a job over passages of mixed lengths from the demonstration corpus, in turns with bare forward passes.

    The bare passes get batches as well packed as the job's, keep no cache and write nothing. The job prefills after the
    system prefix, ranks tokens, and writes to a folder, all forced to disk. `throughput_to_bare` is the throughput
    of the job over that of the bare passes, median of the pairs. `computed_share` is the number of tokens that the job
    computed over the number that it stored.
    """
    ids = lm.tokenizer(" ".join(corpus().values()), add_special_tokens=False)["input_ids"]
    passages: list[tuple[int, ...]] = []
    start = 0
    for number in range(chunks):
        length = LENGTHS[number % len(LENGTHS)]
        passages.append(tuple(ids[(start + i) % len(ids)] for i in range(length)))
        start += length
    bound = batch_tokens or BATCH_TOKENS.get(lm.device.type, BATCH_TOKENS["cuda"])
    total = sum(map(len, passages))
    job_s, bare_s, computed = [], [], 0
    _forward_passes(lm, passages[:4], bound)
    for _ in range(repeats):
        bare_s.append(seconds(lm, lambda: _forward_passes(lm, passages, bound)))
        with tempfile.TemporaryDirectory() as folder, DiskStore(folder) as store:
            summary = FusionEngine(lm, store).corpus.warm_job(passages, bases=(FRAMED,), batch_tokens=bound).run()
            job_s.append(summary.elapsed_s)
            computed = summary.computed_tokens
    throughput_to_bare = median(bare / job for bare, job in zip(bare_s, job_s, strict=True))
    sizes = {"chunks": len(passages), "tokens": total, "batch_tokens": bound}
    rates = {"throughput_to_bare": throughput_to_bare, "computed_share": computed / total}
    return {**sizes, "job_s": job_s, "bare_s": bare_s, **rates}


@torch.inference_mode()
def _forward_passes(lm: LanguageModel, passages: list[tuple[int, ...]], bound: int) -> None:
    with stock_attention(lm):
        for batch in batches_by_length(passages, len, batch_tokens=bound):
            longest = max(map(len, batch))
            ids = torch.tensor([(*passage, *(0 for _ in range(longest - len(passage)))) for passage in batch])
            lm.model(input_ids=ids.to(lm.device), use_cache=True, logits_to_keep=1)
