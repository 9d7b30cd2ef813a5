"""Parts that `auto` does without: would they bring the first token nearer to full prefill's?

    python benchmarks/variants.py DATA.jsonl... [--model M] [--size 20] [--distractors 2] [--store DIR] [--json FILE]

Each variant is `auto` with one thing changed, at the same ratio and on the same questions; KL in nats from full prefill
of the same prompt, differences to `auto` paired, with 95 % bootstrap intervals.

- nested sets: each layer its own tokens, as RelaxKV (arXiv 2609.33503), as many in the mean over layers.
- residual shift: what is not recomputed moves with what is, as AgentKVShift (arXiv 2607.21604).
- rank r: primed caches kept as framed ones and a difference of that rank in each layer, for keys and for values.
- best first: the passage that gets most attention stands first, where its framed cache is exact.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from qcfuse_rag import FusionEngine, MemoryStore, Method, Prompt, make_method, open_store
from qcfuse_rag.bundled import default_model
from qcfuse_rag.cli.console import quiet_libraries
from qcfuse_rag.evaluation.quality.bootstrap import mean_interval
from qcfuse_rag.evaluation.questions import read_dataset
from qcfuse_rag.fusion.adapters import AdaptedChunk, Adapter, PlacementContext, add_differences
from qcfuse_rag.fusion.selectors import NestedTokens
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.ingestion.capture_job import difference_of
from qcfuse_rag.methods.agentkvshift import MeanShift
from qcfuse_rag.monitoring.divergence import divergence
from qcfuse_rag.prompts.segments import Role
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import to_format
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.prefill_base import FRAMED

FULL, AUTO = make_method("full"), make_method("auto", guard=False)
RANKS = (4, 16, 64)


@dataclass(frozen=True)
class LowRank:
    """What `auto` places, its primed caches as if they had been kept as differences of a rank."""

    inner: Adapter
    numbers: str

    def adapt(self, place: PlacementContext, found: ChunkKV | Miss) -> AdaptedChunk | Miss:
        """Return framed caches with the difference added as far as the rank goes."""
        adapted = self.inner.adapt(place, found)
        framed = place.store.get(FRAMED.key(place.lm.fingerprint, place.prompt.prefix_ids, place.span.segment.ids))
        if isinstance(adapted, Miss) or adapted.exact or isinstance(framed, Miss):
            return adapted
        difference = to_format(difference_of(adapted.chunk, framed), self.numbers)
        return replace(adapted, chunk=add_differences(framed, [(1.0, difference)]))


def variants() -> dict[str, Method]:
    """Return `auto` and what is changed of it."""
    assert AUTO.adapter is not None
    ranks = {f"rank {r}": replace(AUTO, adapter=LowRank(AUTO.adapter, f"rank{r}")) for r in RANKS}
    return {
        "auto": AUTO,
        "nested sets": replace(AUTO, selector=NestedTokens("average")),
        "residual shift": replace(AUTO, layer_hook=MeanShift()),
        **ranks,
    }


def best_first(engine: FusionEngine, prompt: Prompt) -> Prompt:
    """Return the prompt with its passages in the order of the attention they get from its end."""
    assembly = FusedPrompt.empty(engine.lm, prompt, len(prompt))
    assert AUTO.base is not None
    assert AUTO.probe is not None
    assembly.load(engine.store, AUTO.base, AUTO.adapter)
    looked_at = AUTO.probe.scores(assembly).mean
    spans = sorted(prompt.chunks, key=lambda span: -float(looked_at[span.start : span.stop].sum()))
    passages = iter([span.segment for span in spans])
    segments = tuple(next(passages) if one.role is Role.CHUNK else one for one in prompt.segments)
    return replace(prompt, segments=segments)


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
    found: dict[str, list[float]] = {}
    store = MemoryStore(1 << 50) if given.store is None else open_store(given.store)
    with FusionEngine.load(given.model or default_model(), store=store, verdict="ignore") as engine:
        for number, example in enumerate(examples, 1):
            engine.warm(example.passages, bases=AUTO.bases)
            prompt = engine.prompt(example.question, example.passages)
            exact = engine.prefill(prompt, method=FULL).logits
            for name, method in variants().items():
                found.setdefault(name, []).append(divergence(exact, engine.prefill(prompt, method=method).logits))
            turned = best_first(engine, prompt)
            exact = engine.prefill(turned, method=FULL).logits
            found.setdefault("best first", []).append(divergence(exact, engine.prefill(turned, method=AUTO).logits))
            print(f"{number} of {len(examples)}", flush=True)
            if given.json is not None:
                given.json.write_text(json.dumps(found))
    table = Table("variant", "KL", "less auto")
    for name, kl in found.items():
        less = mean_interval([a - b for a, b in zip(kl, found["auto"], strict=True)])
        table.add_row(name, f"{less['mean'] + sum(found['auto']) / len(kl):.3f}", _interval(less))
    Console(width=120).print(table)


def _interval(one: dict[str, float]) -> str:
    return f"{one['mean']:+.3f} [{one['low']:+.3f}, {one['high']:+.3f}]"


if __name__ == "__main__":
    main()
