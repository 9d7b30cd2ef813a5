"""One recompute ratio for all questions against ratios that differ from question to question."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.evaluation.studies.runner import FULL, DataFiles, StudyResult, StudyRun, difference_cell
from qcfuse_rag.fusion.probes import Probe
from qcfuse_rag.fusion.selectors import candidate_positions, recomputable_chunks
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.methods import make_method
from qcfuse_rag.monitoring.divergence import divergence
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.attention.scores import Scores

RATIOS = np.array((0.0125, 0.025, 0.05, 0.1, 0.2))
MEAN = 0.05  # the mean ratio of every policy
Matrix = NDArray[np.float64]  # `[questions, ratios]`


def budgets(run: StudyRun, files: DataFiles) -> StudyResult:
    """Compare one recompute ratio for all questions with ratios that differ from question to question.

    Measures three figures of `auto` for each question and ratio: the divergence of the first token from full prefill
    (KL, in nats), the share of the prompt's attention on the chosen tokens (coverage), and the lead of the best token
    (margin). The policies are tuned on the questions themselves to the same mean cost, so they look better than they
    would on other questions:

    fixed: the same ratio for every question;
    coverage: the smallest ratio whose tokens have a given share of the attention;
    margin: a small ratio, then a large one for the questions with the smallest margin, where both are paid for;
    oracle: knows every divergence beforehand, and is the limit of all policies.
    """
    rows: list[dict[str, list[float]]] = []
    for row in files.measure(run, make_method("auto").bases, _measure):
        rows.append(row)
        run.keep({"ratios": RATIOS.tolist(), "questions": rows})
    results = policies(rows)
    table = Table("policy", "KL", f"less fixed {MEAN:g}")
    for name, kl in results.items():
        table.add_row(name, f"{kl.mean():.3f}", difference_cell(kl.tolist(), results[f"fixed {MEAN:g}"].tolist()))
    return StudyResult({"ratios": RATIOS.tolist(), "questions": rows}, [table])


@dataclass
class CoverageProbe:
    """A probe that also notes the share of attention on its best tokens at each ratio."""

    probe: Probe
    coverage: tuple[float, ...] = ()

    def scores(self, fused: FusedPrompt) -> Scores:
        """Score the prompt and note the coverage."""
        scores = self.probe.scores(fused)
        ranked = scores.mean[candidate_positions(recomputable_chunks(fused))].sort(descending=True).values
        cumulated = ranked.cumsum(0) / ranked.sum()
        self.coverage = tuple(float(cumulated[max(1, int(ratio * len(ranked))) - 1]) for ratio in RATIOS)
        return scores


def _measure(engine: FusionEngine, prompt: Prompt) -> dict[str, list[float]]:
    exact = engine.prefill(prompt, method=FULL).logits
    base = make_method("auto", guard=False)
    assert base.probe is not None
    probe = CoverageProbe(base.probe)
    row: dict[str, list[float]] = {"kl": [], "margin": [], "agrees": []}
    for ratio in RATIOS.tolist():
        method = replace(base, probe=probe, budget=make_method("auto", ratio=ratio).budget)
        logits = engine.prefill(prompt, method=method).logits
        first, second = torch.topk(logits.softmax(-1), 2).values.tolist()
        row["kl"].append(divergence(exact, logits))
        row["margin"].append(first - second)
        row["agrees"].append(float(logits.argmax() == exact.argmax()))
    return {**row, "coverage": list(probe.coverage)}


def policies(rows: list[dict[str, list[float]]]) -> dict[str, Matrix]:
    """Return the divergence of every question under each policy."""
    kl, margin, coverage = (np.array([row[name] for row in rows]) for name in ("kl", "margin", "coverage"))
    results = {f"fixed {ratio:g}": kl[:, column] for column, ratio in enumerate(RATIOS)}
    results["coverage"] = np.take_along_axis(kl, _columns_by_coverage(coverage)[:, None], 1)[:, 0]
    for low, high in ((0, 3), (0, 4), (1, 3), (1, 4)):
        share = float((MEAN - RATIOS[low]) / RATIOS[high])
        least_certain = margin[:, low].argsort()[: int(share * len(kl))]
        result = kl[:, low].copy()
        result[least_certain] = kl[least_certain, high]
        results[f"margin {RATIOS[low]:g}, {share:.0%} again at {RATIOS[high]:g}"] = result
    return {**results, "oracle": _by_oracle(kl)}


def _columns_by_coverage(coverage: Matrix) -> NDArray[np.int64]:
    """Return each question's column: the smallest ratio with enough coverage, at a mean ratio of `MEAN` at most."""
    best = np.zeros(len(coverage), np.int64)
    for enough in np.unique(coverage):
        chosen = np.where((coverage >= enough).any(1), (coverage >= enough).argmax(1), len(RATIOS) - 1)
        if RATIOS[chosen].mean() <= MEAN:
            best = chosen
    return best


def _by_oracle(kl: Matrix) -> Matrix:
    """Return divergences when ratios are raised where that lowers the divergence most, at a mean ratio of `MEAN`."""
    low = np.minimum.accumulate(kl, 1)
    chosen = np.zeros(len(kl), np.int64)
    steps = [
        ((low[question, left] - low[question, right]) / (RATIOS[right] - RATIOS[left]), question, right)
        for question in range(len(kl))
        for left, right in pairwise(range(len(RATIOS)))
    ]
    for _, question, column in sorted(steps, reverse=True):
        tried = chosen.copy()
        tried[question] = max(tried[question], column)
        if RATIOS[tried].mean() <= MEAN:
            chosen = tried
    return np.take_along_axis(low, chosen[:, None], 1)[:, 0]
