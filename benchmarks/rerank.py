"""Reranking from stored caches: how well a question's rows over each passage's cache rank the passages."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from typer import Option

from benchmarks.configurations import split_names
from benchmarks.options import ModelOptions, counts
from benchmarks.questions import Example, read_dataset
from benchmarks.runner import Record, Report, Run, Table, about_model, machine_conditions
from benchmarks.scoring import format_interval, mean_interval
from qcfuse_rag.bundled import default_embedder, paragraphs, questions
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.library.embedder import Embedder
from qcfuse_rag.library.index import nearest
from qcfuse_rag.methods.reuse import reuse
from qcfuse_rag.models.fingerprint import digest
from qcfuse_rag.store.backends.memory import UNLIMITED, MemoryStore
from qcfuse_rag.store.factory import DEFAULT_KV_DTYPE
from qcfuse_rag.store.key import BLIND, FRAMED, PRIMED, Base

BASES = {base.name: base for base in (FRAMED, PRIMED)}
TIMED_TOKENS = 150


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Options of the measurement."""

    dataset: Annotated[
        str, Option(help="Files DATASET.jsonl in --data-dir, whose questions have `supporting`; with commas.")
    ] = ""
    data_dir: Annotated[Path, Option(help="Folder of the datasets, see `quality --help`.")] = Path(".")
    pooled: Annotated[str, Option(help="Datasets whose candidates are those nearest in the whole set.")] = ""
    candidates: Annotated[int, Option(min=1, help="Passages to order: those nearest to a question.")] = 50
    first: Annotated[int, Option(min=0, help="First question of each dataset.")] = 0
    size: Annotated[int, Option(min=1, help="Questions of each dataset.")] = 50
    bases: Annotated[str, Option(help="Stored caches, with commas: framed, which are exact, primed.")] = "framed,primed"
    timed: Annotated[str, Option(help="Numbers of passages to time, with commas; each has some 150 tokens.")] = ""


def measure(options: Options, run: Run) -> None:
    """Score the candidates of every question."""
    names = split_names(options.dataset)
    pooled, bases = options.pooled.split(","), [BASES[base] for base in options.bases.split(",")]
    with MemoryStore(UNLIMITED, kv_dtype=DEFAULT_KV_DTYPE) as store, options.load_engine(store) as engine:
        sources = {name: digest((options.data_dir / f"{name}.jsonl").read_bytes()) for name in names}
        conditions = {**machine_conditions(engine.lm), "datasets": sources, "candidates": options.candidates}
        run.begin(about_model(engine.lm), conditions)
        for count in counts(options.timed):
            if ("time", count) not in run.records:
                run.add(("time", count), timed(engine, count))
        embed = Embedder(default_embedder())
        asked = [candidates(embed, options, name, whole_set=name in pooled) for name in names]
        turns = zip_longest(*asked)  # a question of each dataset in turn, so that a stopped run has some of each
        for done, example in enumerate(filter(None, chain.from_iterable(turns)), 1):
            key = ("question", example.dataset, example.id)
            if key not in run.records:
                engine.warm(example.passages, bases=bases)
                run.add(key, score(engine, embed, example, bases))
            run.progress(done, options.size * len(names))


def timed(engine: FusionEngine, count: int) -> Record:
    """Return the processor's seconds and the bytes of reranking `count` passages, stored and read anew."""
    question, text = questions()[0].question, ""
    for part in paragraphs():
        text = text if len(engine.prompts.chunk_ids(text)) >= TIMED_TOKENS else f"{text}\n{part}".strip()
    ids = engine.prompts.chunk_ids(text)[:TIMED_TOKENS]
    passage = engine.lm.tokenizer.decode(ids).strip()
    engine.warm([passage], bases=(PRIMED,))
    record: Record = {"tokens": len(engine.prompts.chunk_ids(passage))}
    for name, base in (("stored", PRIMED), ("anew", BLIND)):  # the system prefix is stored in both cases
        engine.rerank(question, [passage], method=reuse(base))
        began, began_cpu = time.perf_counter(), time.process_time()
        found = engine.rerank(question, [passage] * count, method=reuse(base))
        record[name] = {
            "cpu_s": time.process_time() - began_cpu,
            "s": time.perf_counter() - began,
            "rows": found.rows,
            "bytes": found.bytes_loaded,
        }
    return record


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
    record: Record = {
        "gold": int(example.answers[0]),
        "supporting": example.supporting,
        "retriever": rounded(vectors[1:] @ vectors[0]),
    }
    for base in bases:
        record[base.name] = rounded(likelihoods(engine, example, base))
    return record


def likelihoods(engine: FusionEngine, example: Example, base: Base) -> NDArray[np.float64]:
    """Return the mean log-likelihood of the question behind each passage alone."""
    found = engine.rerank(example.question, example.passages, method=reuse(base))
    assert found.reused == len(example.passages), found.fallback
    return np.array(found.likelihoods)


def rounded(values: Any) -> list[float]:
    """Round to five digits."""
    return [float(f"{value:.5g}") for value in values.tolist()]


def standardized(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return scores with mean 0 and deviation 1."""
    found: NDArray[np.float64] = (scores - scores.mean()) / max(float(scores.std()), 1e-12)
    return found


def orders(record: Record) -> dict[str, NDArray[np.float64]]:
    """Return the scores of a question's passages, by what orders them."""
    retriever = np.array(record["retriever"], np.float64)
    found = {"MiniLM": retriever}
    for base in BASES.keys() & record.keys():
        found[f"likelihood, {base}"] = likelihood = np.array(record[base], np.float64)
        found[f"likelihood, {base} + MiniLM"] = standardized(likelihood) + standardized(retriever)
    return found


def quality(scores: NDArray[np.float64], supporting: Sequence[int], gold: int) -> dict[str, float]:
    """Return recall at the number of gold passages and at 4, the reciprocal rank of the first, and NDCG at 10."""
    order = np.argsort(-scores, kind="stable").tolist()
    ranks = sorted(order.index(index) for index in supporting)
    ideal = sum(1 / math.log2(rank + 2) for rank in range(min(gold, 10)))
    return {
        "recall": sum(rank < gold for rank in ranks) / gold,
        "recall@4": sum(rank < 4 for rank in ranks) / gold,
        "MRR": 1 / (ranks[0] + 1) if ranks else 0.0,
        "NDCG@10": sum(1 / math.log2(rank + 2) for rank in ranks if rank < 10) / ideal,
    }


def report(run: Run) -> Report:
    """Return a table for each dataset: what orders the passages, how well, and the difference to MiniLM."""
    by_dataset: dict[str, list[Record]] = {}
    for (dataset, _), record in run.of("question"):
        by_dataset.setdefault(str(dataset), []).append(record)
    tables, summary = [], {}
    if times := run.of("time"):
        rows = []
        for (count,), record in times:
            stored, anew = record["stored"], record["anew"]
            share = stored["cpu_s"] / anew["cpu_s"]
            figures = [
                f"{stored['cpu_s']:.2f} s",
                f"{anew['cpu_s']:.2f} s",
                f"{share:.2f}",
                f"{stored['bytes'] / 1e6:.3g} MB",
            ]
            rows.append([str(count), str(record["tokens"]), *figures])
        columns = ["passages", "tokens each", "stored", "anew", "share", "loaded"]
        tables.append(Table("processor's time of reranking", columns, rows))
    for dataset, records in by_dataset.items():
        found: dict[str, list[dict[str, float]]] = {}
        for record in records:
            for name, scores in orders(record).items():
                found.setdefault(name, []).append(quality(scores, record["supporting"], record["gold"]))
        rows = []
        for name, values in found.items():
            line = [name, *(f"{fmean(value[score] for value in values):.3f}" for score in values[0])]
            for score in ("recall", "NDCG@10"):
                pairs = zip(values, found["MiniLM"], strict=True)
                difference = mean_interval([one[score] - other[score] for one, other in pairs])
                line.append("-" if name == "MiniLM" else format_interval(difference))
            rows.append(line)
        summary[dataset] = found
        columns = ["order by", *found["MiniLM"][0], "recall - MiniLM", "NDCG@10 - MiniLM"]
        tables.append(Table(f"{dataset}: {len(records)} questions", columns, rows))
    return Report({"qualities": summary}, tables)
