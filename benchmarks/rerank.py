"""Reranking from stored caches: how well a question's rows over each passage's cache rank the passages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typer import Option

from benchmarks.options import ModelOptions
from benchmarks.questions import Example, read_dataset
from benchmarks.runner import Record, Report, Run, Table, about_model, machine_conditions
from benchmarks.scoring import format_interval, mean_interval
from qcfuse_rag.bundled import default_embedder
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.fusion.rerank import place_passages, question_pass, question_range
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.library.embedder import Embedder
from qcfuse_rag.library.index import nearest
from qcfuse_rag.methods.reuse import reuse
from qcfuse_rag.models.fingerprint import digest
from qcfuse_rag.runtime.attention.scores import attention_weights
from qcfuse_rag.runtime.loading.layer_loader import WaitBudget
from qcfuse_rag.runtime.rows import AttentionParams, RowsPlan
from qcfuse_rag.store.backends.memory import UNLIMITED, MemoryStore
from qcfuse_rag.store.key import FRAMED, PRIMED, Base
from qcfuse_rag.store.factory import DEFAULT_KV_DTYPE

NEUTRAL = "N/A"
BASES = {base.name: base for base in (FRAMED, PRIMED)}
ROWS = 256
"""Most rows of a pass."""


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Options of the measurement."""

    dataset: Annotated[list[str], Option(help="Files DATASET.jsonl in --data-dir, whose questions have `supporting`.")]
    data_dir: Annotated[Path, Option(help="Folder of the datasets, see `quality --help`.")] = Path(".")
    pooled: Annotated[str, Option(help="Datasets whose candidates are those nearest in the whole set.")] = ""
    candidates: Annotated[int, Option(min=1, help="Nearest passages of a pooled dataset.")] = 50
    first: Annotated[int, Option(min=0, help="First question of each dataset.")] = 0
    size: Annotated[int, Option(min=1, help="Questions of each dataset.")] = 50
    bases: Annotated[str, Option(help="Stored caches, with commas: framed, which are exact, primed.")] = "framed,primed"
    timed: Annotated[str, Option(help="Numbers of passages to time, with commas.")] = ""


def measure(options: Options, run: Run) -> None:
    """Score the candidates of every question."""
    names = [name for given in options.dataset for name in given.split(",")]
    pooled, bases = options.pooled.split(","), [BASES[base] for base in options.bases.split(",")]
    with MemoryStore(UNLIMITED, kv_dtype=DEFAULT_KV_DTYPE) as store, options.load_engine(store) as engine:
        sources = {name: digest((options.data_dir / f"{name}.jsonl").read_bytes()) for name in names}
        conditions = {**machine_conditions(engine.lm), "datasets": sources, "candidates": options.candidates}
        run.begin(about_model(engine.lm), conditions)
        embed = Embedder(default_embedder())
        asked = {
            name: list(candidates(embed, options, name, whole_set=name in pooled)) for name in names
        }
        turns = [(name, examples[turn]) for turn in range(options.size) for name, examples in asked.items() if turn < len(examples)]
        for done, (name, example) in enumerate(turns, 1):
            key = ("question", name, example.id)
            if key not in run.records:
                engine.warm(example.passages, bases=bases)
                run.add(key, score(engine, embed, example, bases))
            run.progress(done, len(turns))


def candidates(embed: Embedder, options: Options, name: str, *, whole_set: bool) -> Iterator[Example]:
    """Yield questions over the passages nearest to each, of its own or of the whole set."""
    examples = read_dataset(options.data_dir / f"{name}.jsonl")
    every = list(dict.fromkeys(text for example in examples for text in example.passages)) if whole_set else []
    vectors = embed(every) if whole_set else None
    for example in examples[options.first : options.first + options.size]:
        texts, known = (example.passages, embed(example.passages)) if vectors is None else (every, vectors)
        rows = nearest(known, embed([example.question])[0], options.candidates)
        found, gold = tuple(texts[row] for row in rows), {example.passages[index] for index in example.supporting}
        supporting = tuple(index for index, text in enumerate(found) if text in gold)
        answers = (str(len(example.supporting)), *example.answers)
        yield replace(example, passages=found, supporting=supporting, answers=answers)


def score(engine: FusionEngine, embed: Embedder, example: Example, bases: Sequence[Base]) -> Record:
    """Return all scores of an example's passages."""
    vectors = embed([example.question, *example.passages])
    record: Record = {"gold": int(example.answers[0]), "supporting": example.supporting, "retriever": rounded(vectors[1:] @ vectors[0])}
    for base in bases:
        record[f"single_{base.name}"] = alone(engine, example, base)
        record[f"joint_{base.name}"] = together(engine, example, base)
    return record


def alone(engine: FusionEngine, example: Example, base: Base) -> Record:
    """Return the likelihood of the question and its attention, each passage alone."""
    budget, method = WaitBudget(None), reuse(base)
    prompts = [engine.prompt(example.question, [text]) for text in example.passages]
    start, stop = question_range(prompts[0])
    ids, tokens = prompts[0].ids[start:stop], len(next(s for s in prompts[0].spans if s.segment.text == example.question))
    neutral = engine.prompt(NEUTRAL, [example.passages[0]])
    neutral_start, neutral_stop = question_range(neutral)
    neutral_ids = neutral.ids[neutral_start:neutral_stop]
    size = max(1, ROWS // len(ids))
    found: Record = {"likelihood": [], "attention": [], "neutral": [], "above": []}
    for first in range(0, len(prompts), size):
        placed = [place_passages(engine.runner, prompt, method, budget) for prompt in prompts[first : first + size]]
        assert all(lookup.hit for fused in placed for lookup in fused.lookups if lookup.role == "chunk")
        watched = [Watch(fused) for fused in placed]
        logits = question_pass(placed, ids, last=tokens + 1, observers=[watch.observe for watch in watched])
        wanted = torch.tensor(ids[len(ids) - tokens :], device=logits.device).expand(len(placed), -1)
        chances = logits[:, :-1].log_softmax(-1).gather(2, wanted[:, :, None])[:, :, 0]
        found["likelihood"] += rounded(chances.mean(1))
        plain = [Watch(fused) for fused in placed]
        question_pass(placed, neutral_ids, observers=[watch.observe for watch in plain])
        for watch, other in zip(watched, plain, strict=True):
            q, n = watch.by_layer, other.by_layer
            found["attention"].append(rounded(q.sum(1)))
            found["neutral"].append(rounded(n.sum(1)))
            found["above"].append(rounded((q - n).clamp_min(0).sum(1)))
    return found


def together(engine: FusionEngine, example: Example, base: Base) -> Record:
    """Return the attention of the question to all passages in one prompt, and that of the neutral question."""
    prompt = engine.prompt(example.question, example.passages)
    fused = place_passages(engine.runner, prompt, reuse(base), WaitBudget(None))
    neutral = engine.prompt(NEUTRAL, example.passages)
    found: Record = {"attention": [], "neutral": [], "above": []}
    watches = []
    for asking in (prompt, neutral):
        start, stop = question_range(asking)
        watches.append(Watch(fused))
        question_pass([fused], asking.ids[start:stop], observers=[watches[-1].observe])
    spans = [(span.start, span.stop) for span in prompt.chunks]
    q, n = (watch.whole for watch in watches)
    for start, stop in spans:
        found["attention"].append(rounded(q[:, start:stop].sum(1)))
        found["neutral"].append(rounded(n[:, start:stop].sum(1)))
        found["above"].append(rounded((q - n)[:, start:stop].clamp_min(0).sum(1)))
    return found


class Watch:
    """The attention of a pass's rows to each position, by layer."""

    def __init__(self, fused: FusedPrompt) -> None:
        self.span, self.length = fused.prompt.chunks[0], len(fused.prompt)
        self.whole = torch.zeros(fused.lm.n_layers, self.length)

    def observe(self, layer: int, query: Tensor, key: Tensor, params: AttentionParams) -> None:
        """Note a layer."""
        length = key.shape[2]
        rows = torch.arange(length - query.shape[2], length)
        weights = attention_weights(query, key, rows, torch.ones(length, dtype=torch.bool), params)
        self.whole[layer, :length] = weights

    @property
    def by_layer(self) -> Tensor:
        """The attention to the only passage."""
        return self.whole[:, self.span.start : self.span.stop]


def rounded(values: Any) -> list[float]:
    """Round to five digits."""
    return [float(f"{value:.5g}") for value in values.tolist()]


def report(run: Run) -> Report:
    """Return nothing yet."""
    return Report({"n": len(run.records)}, [])
