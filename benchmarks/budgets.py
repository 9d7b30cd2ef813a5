"""Would a budget that differs from question to question beat the same one for all? `auto` at several ratios.

    python benchmarks/budgets.py DATA.jsonl... [--model M] [--size 20] [--distractors 2] [--store DIR] [--json FILE]

For every question: how far the first token is from full prefill's (KL, in nats) at each ratio, which share of the
prompt's attention the chosen tokens have (coverage), and by how much the best token leads (margin). From these the
policies below, tuned on the questions themselves so that they cost the same on average: more than they would get on
others. `oracle` knows every divergence beforehand and is what any policy could reach at most.

- fixed: every question the same ratio.
- coverage: the smallest ratio whose tokens have a share of the attention, the same share for all.
- margin: a small ratio, and a large one for the questions whose first token leads by little; both are paid for.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from qcfuse_rag import FusionEngine, MemoryStore, Method, make_method, open_store
from qcfuse_rag.bundled import default_model
from qcfuse_rag.cli.console import quiet_libraries
from qcfuse_rag.evaluation.quality.bootstrap import mean_interval
from qcfuse_rag.evaluation.questions import read_dataset
from qcfuse_rag.fusion.probes import Probe
from qcfuse_rag.fusion.selectors import candidate_positions, recomputable_chunks
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.monitoring.divergence import divergence
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.attention.scores import Scores

RATIOS = (0.0125, 0.025, 0.05, 0.1, 0.2)
MEAN = 0.05

Table_ = NDArray[np.float64]


@dataclass
class Listening:
    """A probe, and the share of attention that its best tokens have, at each ratio."""

    probe: Probe
    coverage: tuple[float, ...] = ()

    def scores(self, assembly: FusedPrompt) -> Scores:
        """Score, and keep the coverage."""
        scores = self.probe.scores(assembly)
        own = scores.mean[candidate_positions(recomputable_chunks(assembly))].sort(descending=True).values
        total = own.cumsum(0) / own.sum()
        self.coverage = tuple(float(total[max(1, int(ratio * len(own))) - 1]) for ratio in RATIOS)
        return scores


def measure(engine: FusionEngine, prompt: Prompt) -> dict[str, list[float]]:
    """Return divergence, coverage and margin at each ratio."""
    exact = engine.prefill(prompt, method=make_method("full")).logits
    base = make_method("auto", guard=False)
    assert base.probe is not None
    listening = Listening(base.probe)
    found: dict[str, list[float]] = {"kl": [], "margin": [], "agrees": []}
    for ratio in RATIOS:
        method: Method = replace(base, probe=listening, budget=make_method("auto", ratio=ratio).budget)
        logits = engine.prefill(prompt, method=method).logits
        first, second = torch.topk(logits.softmax(-1), 2).values.tolist()
        found["kl"].append(divergence(exact, logits))
        found["margin"].append(first - second)
        found["agrees"].append(float(logits.argmax() == exact.argmax()))
    return {**found, "coverage": list(listening.coverage)}


def by_coverage(coverage: Table_) -> NDArray[np.int64]:
    """Return each question's column: the smallest ratio that covers enough, costing `MEAN` at most on average."""
    ratios = np.array(RATIOS)
    best = np.zeros(len(coverage), np.int64)
    for enough in np.unique(coverage):
        chosen = np.where((coverage >= enough).any(1), (coverage >= enough).argmax(1), len(ratios) - 1)
        if ratios[chosen].mean() <= MEAN:
            best = chosen
    return best


def by_margin(margin: Table_, kl: Table_, low: int, high: int) -> tuple[Table_, float]:
    """Return divergences when the questions of least margin at column `low` are answered at `high`; and the share."""
    share = (MEAN - RATIOS[low]) / RATIOS[high]
    again = margin[:, low].argsort()[: int(share * len(kl))]
    result = kl[:, low].copy()
    result[again] = kl[again, high]
    return result, share


def by_oracle(kl: Table_) -> Table_:
    """Return divergences when rows are given where they lower the divergence most, costing `MEAN` on average."""
    low = np.minimum.accumulate(kl, 1)
    chosen = np.zeros(len(kl), np.int64)
    steps = [
        ((low[q, a] - low[q, b]) / (RATIOS[b] - RATIOS[a]), q, b)
        for q in range(len(kl))
        for a, b in pairwise(range(len(RATIOS)))
    ]
    for _, question, column in sorted(steps, reverse=True):
        tried = chosen.copy()
        tried[question] = max(tried[question], column)
        if np.array(RATIOS)[tried].mean() <= MEAN:
            chosen = tried
    return np.take_along_axis(low, chosen[:, None], 1)[:, 0]


def policies(rows: list[dict[str, list[float]]]) -> dict[str, Table_]:
    """Return the divergence of every question under each policy."""
    kl, margin, coverage = (np.array([row[name] for row in rows]) for name in ("kl", "margin", "coverage"))
    found = {f"fixed {ratio:g}": kl[:, column] for column, ratio in enumerate(RATIOS)}
    found["coverage"] = np.take_along_axis(kl, by_coverage(coverage)[:, None], 1)[:, 0]
    for low, high in ((0, 3), (0, 4), (1, 3), (1, 4)):
        result, share = by_margin(margin, kl, low, high)
        found[f"margin {RATIOS[low]:g}, {share:.0%} again at {RATIOS[high]:g}"] = result
    return {**found, "oracle": by_oracle(kl)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument("--model")
    parser.add_argument("--size", type=int, default=20)
    parser.add_argument("--distractors", type=int, default=2)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    quiet_libraries()
    examples = [one for path in given.data for one in read_dataset(path, size=given.size)]
    examples = [one.with_distractors(given.distractors) if one.supporting else one for one in examples]
    rows: list[dict[str, list[float]]] = []
    store = MemoryStore(64 << 30) if given.store is None else open_store(given.store)
    with FusionEngine.load(given.model or default_model(), store=store, verdict="ignore") as engine:
        for number, example in enumerate(examples, 1):
            engine.warm(example.passages, bases=make_method("auto").bases)
            rows.append(measure(engine, engine.prompt(example.question, example.passages)))
            print(f"{number} of {len(examples)}", flush=True)
            if given.json is not None:
                given.json.write_text(json.dumps({"ratios": RATIOS, "questions": rows}))
    found = policies(rows)
    table = Table("policy", "KL", f"less fixed {MEAN:g}")
    for name, kl in found.items():
        less = mean_interval((kl - found[f"fixed {MEAN:g}"]).tolist())
        table.add_row(name, f"{kl.mean():.3f}", f"{less['mean']:+.3f} [{less['low']:+.3f}, {less['high']:+.3f}]")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
