"""`qcfuse bench warm`: a warming job against nothing but the forward passes it is made of."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from qcfuse_rag.bundled import corpus
from qcfuse_rag.cli.console import duration
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.engine.exactness_check import stock_attention
from qcfuse_rag.ingestion.length_buckets import batches_by_length
from qcfuse_rag.ingestion.warm_job import BATCH_TOKENS
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.disk import DiskStore
from qcfuse_rag.store.prefill_base import FRAMED

LENGTHS = (37, 380, 64, 256, 120, 300, 90, 180, 48, 220)


@dataclass(frozen=True, slots=True)
class WarmingRates:
    """What was measured.

    Attributes:
        chunks: how many.
        tokens: of all chunks.
        batch_tokens: bound of a batch.
        job_s: seconds of each run of the job, caches written and forced to disk.
        bare_s: seconds of each run of transformers' own forward passes over batches of the same chunks.
        ratio: throughput of the job over that of the bare passes, median of the pairs.
        computed_share: tokens the job computed over tokens it stored.
    """

    chunks: int
    tokens: int
    batch_tokens: int
    job_s: list[float]
    bare_s: list[float]
    ratio: float
    computed_share: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    def table(self) -> Table:
        """Return the figures as a table."""
        table = Table("", "seconds", "tokens a second", title=f"{self.chunks} chunks, {self.tokens:,} tokens")
        for name, times in (("bare forward passes", self.bare_s), ("warming job", self.job_s)):
            median = statistics.median(times)
            table.add_row(name, duration(median), f"{self.tokens / median:,.0f}")
        table.add_row("ratio", f"{self.ratio:.2f}", "")
        return table


def measure_warming(
    lm: LanguageModel, *, chunks: int = 40, repeats: int = 3, batch_tokens: int | None = None
) -> WarmingRates:
    """Measure a job over chunks of mixed lengths from the demonstration's documents, alternating the two sides.

    The bare side gets its batches as well packed as the job's own, keeps no cache and writes nothing. The job prefills
    behind the prompt's head, ranks tokens, and writes to a folder.

    Args:
        lm: the model.
        chunks: how many.
        repeats: runs of each side.
        batch_tokens: bound of a batch; the job's own if None.
    """
    words = lm.tokenizer(" ".join(corpus().values()), add_special_tokens=False)["input_ids"]
    pieces: list[tuple[int, ...]] = []
    at = 0
    for number in range(chunks):
        length = LENGTHS[number % len(LENGTHS)]
        pieces.append(tuple(words[(at + i) % len(words)] for i in range(length)))
        at += length
    bound = batch_tokens or BATCH_TOKENS.get(lm.device.type, BATCH_TOKENS["cuda"])
    total = sum(len(piece) for piece in pieces)
    job_s, bare_s, computed = [], [], 0
    _bare(lm, pieces[:4], bound)
    for _ in range(repeats):
        bare_s.append(_bare(lm, pieces, bound))
        with tempfile.TemporaryDirectory() as folder, DiskStore(folder) as store:
            engine = FusionEngine(lm, store)
            summary = engine.warm_job(pieces, bases=(FRAMED,), batch_tokens=bound).run()
            job_s.append(summary.elapsed_s)
            computed = summary.computed_tokens
    ratio = statistics.median(bare / job for bare, job in zip(bare_s, job_s, strict=True))
    return WarmingRates(len(pieces), total, bound, job_s, bare_s, ratio, computed / total)


@torch.inference_mode()
def _bare(lm: LanguageModel, pieces: list[tuple[int, ...]], bound: int) -> float:
    begun = time.perf_counter()
    with stock_attention(lm):
        for batch in batches_by_length(pieces, len, batch_tokens=bound):
            longest = max(map(len, batch))
            ids = torch.tensor([(*piece, *(0 for _ in range(longest - len(piece)))) for piece in batch])
            lm.model(input_ids=ids.to(lm.device), use_cache=True, logits_to_keep=1)
    if lm.device.type == "cuda":
        torch.cuda.synchronize(lm.device)
    return time.perf_counter() - begun
