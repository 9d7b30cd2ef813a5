"""Variants of `auto`: does a different part bring the first token nearer to full prefill's?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

from rich.table import Table

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.evaluation.studies.runner import FULL, DataFiles, StudyResult, StudyRun, difference_cell
from qcfuse_rag.fusion.adapters import AdaptedChunk, Adapter, PlacementContext, add_differences
from qcfuse_rag.fusion.selectors import NestedTokens
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.ingestion.capture_job import difference_of
from qcfuse_rag.methods import make_method
from qcfuse_rag.methods.agentkvshift import MeanShift
from qcfuse_rag.monitoring.divergence import divergence
from qcfuse_rag.prompts.segments import Prompt, Role
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import ChunkKV, to_format
from qcfuse_rag.store.prefill_base import FRAMED

AUTO = make_method("auto", guard=False)
RANKS = (4, 16, 64)


def variants(run: StudyRun, files: DataFiles) -> StudyResult:
    """Compare `auto` with variants of its parts: is the first token nearer to full prefill's?

    Each variant changes one part of `auto`, at the same ratio and on the same questions. KL is in nats, from full
    prefill of the same prompt; differences to `auto` are paired, with 95 % bootstrap intervals. The variants:

    nested sets: each layer has its own tokens, as in RelaxKV (arXiv 2609.33503), as many in the mean over layers;
    residual shift: tokens that are not recomputed move with those that are, as in AgentKVShift (arXiv 2607.21604);
    rank r: primed caches kept as framed caches and a difference of that rank in each layer, for keys and for values;
    best first: the passage with most attention stands first, where its framed cache is exact.
    """
    assert AUTO.adapter is not None
    methods = {
        "auto": AUTO,
        "nested sets": replace(AUTO, selector=NestedTokens("average")),
        "residual shift": replace(AUTO, layer_hook=MeanShift()),
        **{f"rank {rank}": replace(AUTO, adapter=LowRank(AUTO.adapter, f"rank{rank}")) for rank in RANKS},
    }
    kl: dict[str, list[float]] = {name: [] for name in (*methods, "best first")}

    def measure(engine: FusionEngine, prompt: Prompt) -> None:
        exact = engine.prefill(prompt, method=FULL).logits
        for name, method in methods.items():
            kl[name].append(divergence(exact, engine.prefill(prompt, method=method).logits))
        reordered = best_first(engine, prompt)
        exact = engine.prefill(reordered, method=FULL).logits
        kl["best first"].append(divergence(exact, engine.prefill(reordered, method=AUTO).logits))

    for _ in files.measure(run, AUTO.bases, measure):
        run.keep(kl)
    table = Table("variant", "KL", "less auto")
    for name, values in kl.items():
        table.add_row(name, f"{fmean(values):.3f}", difference_cell(values, kl["auto"]))
    return StudyResult(kl, [table])


@dataclass(frozen=True)
class LowRank:
    """An adapter that treats primed caches as if they had been stored as differences of a given rank."""

    inner: Adapter
    numbers: str

    def adapt(self, context: PlacementContext, stored: ChunkKV | Miss) -> AdaptedChunk | Miss:
        """Return framed caches with the difference added as far as the rank goes."""
        adapted = self.inner.adapt(context, stored)
        framed = context.store.get(
            FRAMED.key(context.lm.fingerprint, context.prompt.prefix_ids, context.span.segment.ids)
        )
        if isinstance(adapted, Miss) or adapted.exact or isinstance(framed, Miss):
            return adapted
        difference = to_format(difference_of(adapted.chunk, framed), self.numbers)
        return replace(adapted, chunk=add_differences(framed, [(1.0, difference)]))


def best_first(engine: FusionEngine, prompt: Prompt) -> Prompt:
    """Return the prompt with its passages sorted by the attention that they get from its end."""
    assert AUTO.base is not None
    assert AUTO.probe is not None
    fused = FusedPrompt.empty(engine.runner, prompt, len(prompt))
    fused.load(AUTO.base, AUTO.adapter)
    attention = AUTO.probe.scores(fused).mean
    spans = sorted(prompt.chunks, key=lambda span: -float(attention[span.start : span.stop].sum()))
    passages = iter([span.segment for span in spans])
    segments = (next(passages) if segment.role is Role.CHUNK else segment for segment in prompt.segments)
    return replace(prompt, segments=tuple(segments))
