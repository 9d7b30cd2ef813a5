"""The layers that the probe of `auto` must look at."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, median

from rich.table import Table

from benchmarks.studies.runner import FULL_PREFILL, DataFiles, StudyResult, StudyRun, difference_cell
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.methods import make_method
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.verification.divergence import divergence

DEFAULT = "1/2 to 1"
DEPTHS = {
    DEFAULT: (1 / 2, 1),
    "0 to 1": (0, 1),
    "3/4 to 1": (3 / 4, 1),
    "1/2 to 3/4": (1 / 2, 3 / 4),
    "3/8 to 5/8": (3 / 8, 5 / 8),
    "1/4 to 1/2": (1 / 4, 1 / 2),
}
"""The depths between which attention counts, as shares of the layers."""


def probe_layers(run: StudyRun, files: DataFiles, ratio: float = 0.05, store: Path | None = None) -> StudyResult:
    """Compare the layers that the probe of `auto` may look at; the pass and its wait for caches end after the last.

    Each side is `auto` with attention counted between two depths. KL is in nats, from full prefill of the same prompt;
    differences to `auto` as it is are paired, with 95 % bootstrap intervals. `probe` is the median share of the probe
    in the time of a fused prefill. Questions come from files of JSON lines; `--skip` leaves out the first of each file.
    """
    kl: dict[str, list[float]] = {name: [] for name in DEPTHS}
    share: dict[str, list[float]] = {name: [] for name in DEPTHS}

    def measure(engine: FusionEngine, prompt: Prompt) -> None:
        exact = engine.prefill(prompt, method=FULL_PREFILL).logits
        for name, (start, stop) in DEPTHS.items():
            n_layers = engine.lm.n_layers
            layers = tuple(range(int(start * n_layers), round(stop * n_layers)))
            fused = engine.prefill(prompt, method=make_method("auto", ratio=ratio, guard=False, layers=layers))
            kl[name].append(divergence(exact, fused.logits))
            share[name].append(fused.report.timings.probe_s / fused.report.timings.ttft_s)

    for _ in files.measure(run, make_method("auto").bases, measure, store):
        run.keep({"kl": kl, "probe_share": share})
    table = Table("layers", "KL", "KL, median", "less auto", "probe")
    for name, values in kl.items():
        difference = difference_cell(values, kl[DEFAULT])
        table.add_row(name, f"{fmean(values):.3f}", f"{median(values):.3f}", difference, f"{median(share[name]):.0%}")
    return StudyResult({"kl": kl, "probe_share": share}, [table])
