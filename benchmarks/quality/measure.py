"""Measure the quality of methods, from options to records and summary; a stopped run continues."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.environment import about_run, require_json_name
from benchmarks.quality.configurations import NO_PASSAGES, configurations, method_name
from benchmarks.quality.metrics import rouge_scorer
from benchmarks.quality.offline import NeighbourPool, preparation_of
from benchmarks.quality.records import Record, RecordLog
from benchmarks.quality.run import run_questions
from benchmarks.quality.summary import summarize
from benchmarks.quality.tables import markdown
from benchmarks.questions import BadDataset, first_passages, passage_texts, read_dataset
from benchmarks.samples import Example
from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.bundled import corpus
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.fusion.method import IN_FULL
from qcfuse_rag.methods.fusionrag import NEIGHBOURS
from qcfuse_rag.methods.qcfuse.layers import critical_layers
from qcfuse_rag.models.fingerprint import digest
from qcfuse_rag.store.backends.disk import DiskStore
from qcfuse_rag.store.backends.memory import UNLIMITED, MemoryStore
from qcfuse_rag.store.entry.encryption import environment_cipher
from qcfuse_rag.verification.cases import TASKS, ruler_cases


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """The options of `python -m benchmarks quality`; its help describes them.

    Datasets are files `{dataset}.jsonl`, or RULER-style tasks, generated if they have no file. Records go beside `out`.
    Without a store, passages are kept in memory. `pool` are files or folders of JSON lines.
    """

    model: str
    data_dir: Path
    datasets: tuple[str, ...]
    methods: tuple[str, ...]
    out: Path
    ratios: tuple[float, ...] = ()
    bases: tuple[str, ...] = ()
    size: int = 100
    distractors: int | None = None
    top_k: int | None = None
    seed: int = 0
    max_new_tokens: int | None = None
    ruler_tokens: int = 2048
    group: int = 20
    store: Path | None = None
    device: str | None = None
    dtype: str | None = None
    weights: str = "model"
    pool: tuple[Path, ...] = ()
    neighbours: int = NEIGHBOURS


def measure_quality(options: QualityOptions, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Run the missing configurations, write result and table, and return the result as plain data.

    Records are kept in `{out}.partial.jsonl` as they come. A run with the same options continues from it, and a run
    with more methods adds to it; other data or another model is refused.
    """
    require_json_name(options.out)
    if not options.datasets:
        raise QCFuseError("name a dataset, or several with commas")
    rouge_scorer()
    full, *methods = configurations(options.methods, options.ratios, options.bases)
    chosen = [full, NO_PASSAGES, *methods]
    for name in options.datasets:
        if name in TASKS and options.top_k is not None and not (options.data_dir / f"{name}.jsonl").exists():
            raise QCFuseError(
                f"--top-k would cut away part of what {name} hides; run it apart, its length is --ruler-tokens"
            )
    store = MemoryStore(UNLIMITED) if options.store is None else DiskStore(options.store, cipher=environment_cipher())
    with (
        store,
        FusionEngine.load(
            options.model,
            store=store,
            device=options.device,
            dtype=options.dtype,
            weights=options.weights,
            prefix_bytes=0,
        ) as engine,
    ):
        examples, sources = read_examples(options, engine)
        notes = on_distractors(examples) if options.distractors is not None else []
        conditions = _conditions(options, engine, sources)
        with closing(RecordLog(options.out.with_suffix(".partial.jsonl"), conditions)) as log:
            group, pool = conditions["group"], _pool(options)
            notes += run_questions(engine, examples, chosen, log, group=group, pool=pool, progress=progress)
            wanted = {(example.dataset, example.id) for example in examples}
            records = [record for record in log.records.values() if (record["dataset"], record["id"]) in wanted]
            if not records:
                raise QCFuseError("; ".join(["no question could be measured", *notes]))
            notes += on_log(log, kept=options.store is not None) + on_methods(records)
            needed = {configuration.key: preparation_of(configuration) for configuration in chosen}
            preparations = {key: None if value is None else value.name for key, value in needed.items()}
            summary = summarize(records, log.offline, preparations, seed=options.seed)
        written = json.loads(json.dumps(asdict(options), default=str))
        about = {**about_run(engine.lm, options.model), "options": written, "conditions": conditions, "notes": notes}
    result = {"about": about, "records": records, "summary": summary}
    write_atomically(options.out, json.dumps(result, ensure_ascii=False, indent=1))
    write_atomically(options.out.with_suffix(".md"), markdown(summary, about))
    return result


def _pool(options: QualityOptions) -> NeighbourPool:
    """Return the corpus of neighbours: passages as in prompts, with their titles."""
    files = [file for path in options.pool for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    texts = [text for file in files for example in read_dataset(file) for text in example.passages]
    return NeighbourPool(tuple(texts), options.neighbours)


def read_examples(options: QualityOptions, engine: FusionEngine) -> tuple[list[Example], dict[str, str]]:
    """Read or generate the questions of all datasets; return them and a digest of each dataset's source."""
    examples: list[Example] = []
    sources: dict[str, str] = {}
    for name in dict.fromkeys(options.datasets):
        path = options.data_dir / f"{name}.jsonl"
        if path.exists() or name not in TASKS:
            if not path.exists():
                available = ", ".join(sorted(file.stem for file in options.data_dir.glob("*.jsonl"))) or "none"
                raise BadDataset(
                    f"there is no dataset {name!r} in {options.data_dir}; there are {available}, and {', '.join(TASKS)}"
                )
            dataset = [replace(example, dataset=name) for example in read_dataset(path, size=options.size)]
            sources[name] = digest(path.read_bytes())
            if options.distractors is not None:
                # Which passages hold the answer is not guessed: a question of two steps would lose the first.
                dataset = [
                    example.with_distractors(options.distractors) if example.supporting else example
                    for example in dataset
                ]
        else:
            haystack = list(dict.fromkeys(passage_texts(options.data_dir))) or list(corpus().values())
            cases = ruler_cases(engine, name, options.size, options.ruler_tokens, haystack, options.seed)
            dataset = [
                Example(
                    case.question,
                    case.passages,
                    case.expected,
                    id=str(number),
                    dataset=name,
                    needs_all=True,
                    max_new_tokens=case.max_new_tokens,
                )
                for number, case in enumerate(cases)
            ]
            sources[name] = f"generated {options.ruler_tokens} {digest(chr(0).join(haystack).encode())}"
        if options.top_k is not None:
            dataset = [first_passages(example, options.top_k) for example in dataset]
        if options.max_new_tokens is not None:
            dataset = [replace(example, max_new_tokens=options.max_new_tokens) for example in dataset]
        examples += dataset
    return examples, sources


def _conditions(options: QualityOptions, engine: FusionEngine, sources: dict[str, str]) -> dict[str, Any]:
    """Return the conditions on which records depend; methods and the number of questions may change."""
    about = about_run(engine.lm, options.model)
    machine = {name: about[name] for name in ("device", "threads")}
    return {
        "model": engine.lm.fingerprint.digest,
        **machine,
        "critical_layers": critical_layers(engine.lm, engine.store.folder),
        "datasets": sources,
        **{name: getattr(options, name) for name in ("distractors", "top_k", "seed", "max_new_tokens")},
        "group": options.group if options.store is None else None,
        "compared": "along full prefill's answer",
        **({"pool": [path.name for path in options.pool]} if options.pool else {}),
        **({"neighbours": options.neighbours} if options.neighbours != NEIGHBOURS else {}),
    }


def on_distractors(examples: Sequence[Example]) -> list[str]:
    """Return a note on the questions that keep all their passages though fewer were asked for."""
    unlabelled = sum(not example.supporting and example.dataset not in TASKS for example in examples)
    return [f"{unlabelled} questions do not say which passages hold the answer; they keep all"] if unlabelled else []


def on_log(log: RecordLog, *, kept: bool) -> list[str]:
    """Return notes on the earlier records that could not be used; `kept` if earlier runs filled the store too."""
    notes = []
    if log.damaged:
        lines = ", ".join(map(str, log.damaged))
        notes.append(f"{log.path}: damaged and left out: line {lines}; records that were there are made anew")
    if log.outdated:
        old = "; passages that the --store had enriched or captured before are used as they are" if kept else ""
        notes.append(
            f"{log.outdated} records of enriched or captured passages were made anew: the earlier ones were made, or "
            f"may have been, beside the passages of other questions, as with another --size{old}"
        )
    return notes


def on_methods(records: Iterable[Record]) -> list[str]:
    """Return notes on answers that a method computed in full, and on inputs that a method lacked."""
    answers, in_full = Counter[str](), Counter[str]()
    for record in records:
        answers[record["method"]] += 1
        in_full[record["method"]] += (record.get("fallback") or "").startswith(IN_FULL)
    notes = [
        f"{method}: {count} of {answers[method]} answers were computed in full, because the guard predicted no gain; "
        f"{method_name(method)}[guard=false] measures fused answers"
        for method, count in in_full.items()
        if count
    ]
    if not any(method_name(method) == "relaycaching" for method in answers):
        return notes
    return [
        *notes,
        "relaycaching: it is made for passages that a model generated, and these are not; the result shows only how it "
        "repairs the stored caches of its base",
    ]
