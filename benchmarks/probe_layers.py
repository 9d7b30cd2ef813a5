"""Which layers must `auto`'s probe look at? Its pass ends after the last of them, and so does its wait for caches.

    python benchmarks/probe_layers.py DATA.jsonl... [--model M] [--size 20] [--skip 0] [--distractors 2] [--ratio 0.05]
        [--store DIR] [--json FILE]

Each configuration is `auto` with attention counted between two depths, as shares of the model's layers. KL in nats
from full prefill of the same prompt, differences to `auto` as it is paired, with 95 % bootstrap intervals; *probe* is
the median share of a fused prefill that it takes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean, median

from rich.console import Console
from rich.progress import track
from rich.table import Table

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, Method, make_method, open_store
from qcfuse_rag.bundled import default_model
from qcfuse_rag.cli.console import quiet_libraries
from qcfuse_rag.evaluation.quality.bootstrap import mean_interval
from qcfuse_rag.evaluation.questions import read_dataset
from qcfuse_rag.monitoring.divergence import divergence

DEPTHS = {
    "1/2 to 1": (1 / 2, 1),
    "0 to 1": (0, 1),
    "3/4 to 1": (3 / 4, 1),
    "1/2 to 3/4": (1 / 2, 3 / 4),
    "3/8 to 5/8": (3 / 8, 5 / 8),
    "1/4 to 1/2": (1 / 4, 1 / 2),
}
"""Where attention counts; the first is `auto` as it is."""


def layers_between(lm: LanguageModel, start: float, stop: float) -> tuple[int, ...]:
    """Return the layers of a model between two depths."""
    return tuple(range(int(start * lm.n_layers), round(stop * lm.n_layers)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument("--model")
    parser.add_argument("--size", type=int, default=20)
    parser.add_argument("--skip", type=int, default=0, help="questions of each file to leave out first")
    parser.add_argument("--distractors", type=int, default=2)
    parser.add_argument("--ratio", type=float, default=0.05)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    quiet_libraries()
    examples = [one for path in given.data for one in read_dataset(path, size=given.skip + given.size)[given.skip :]]
    examples = [one.with_distractors(given.distractors) if one.supporting else one for one in examples]
    store = MemoryStore(1 << 50) if given.store is None else open_store(given.store)
    kl: dict[str, list[float]] = {name: [] for name in DEPTHS}
    share: dict[str, list[float]] = {name: [] for name in DEPTHS}
    with FusionEngine.load(given.model or default_model(), store=store, verdict="ignore") as engine:
        methods: dict[str, Method] = {
            name: make_method("auto", ratio=given.ratio, guard=False, layers=layers_between(engine.lm, *depths))
            for name, depths in DEPTHS.items()
        }
        for example in track(examples, "asking", console=Console(stderr=True)):
            engine.warm(example.passages, bases=methods["1/2 to 1"].bases)
            prompt = engine.prompt(example.question, example.passages)
            exact = engine.prefill(prompt, method=make_method("full")).logits
            for name, method in methods.items():
                done = engine.prefill(prompt, method=method)
                kl[name].append(divergence(exact, done.logits))
                share[name].append(done.report.timings.probe_s / done.report.timings.ttft_s)
            if given.json is not None:
                given.json.write_text(json.dumps({"kl": kl, "probe_share": share}))
    table = Table("layers", "KL", "KL, median", "less auto", "probe")
    for name in DEPTHS:
        less = mean_interval([a - b for a, b in zip(kl[name], kl["1/2 to 1"], strict=True)])
        table.add_row(
            name,
            f"{fmean(kl[name]):.3f}",
            f"{median(kl[name]):.3f}",
            f"{less['mean']:+.3f} [{less['low']:+.3f}, {less['high']:+.3f}]",
            f"{median(share[name]):.0%}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
