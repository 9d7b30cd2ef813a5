"""`qcfuse bench quality`: from options to records, summary, tables and plots; goes on where it was stopped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.evaluation.environment import about_run
from qcfuse_rag.evaluation.quality.configurations import Configuration, configurations, method_name
from qcfuse_rag.evaluation.quality.metrics import rouge_scorer
from qcfuse_rag.evaluation.quality.offline import NeighbourPool, preparation_of
from qcfuse_rag.evaluation.quality.records import Record, RecordLog
from qcfuse_rag.evaluation.quality.run import run_questions
from qcfuse_rag.evaluation.quality.summary import summarize
from qcfuse_rag.evaluation.quality.tables import markdown
from qcfuse_rag.evaluation.questions import BadDataset, first_passages, passage_texts, read_dataset
from qcfuse_rag.fusion.guard import IN_FULL
from qcfuse_rag.ingestion.enrichment import NEIGHBOURS
from qcfuse_rag.models.fingerprint import digest
from qcfuse_rag.store.atomic_write import write_atomically
from qcfuse_rag.store.backends.disk import DiskStore
from qcfuse_rag.store.backends.memory import MemoryStore
from qcfuse_rag.verification.ruler import TASKS, generate
from qcfuse_rag.verification.samples import Example

UNLIMITED = 1 << 50
"""Bytes of the store in memory; what bounds it is the group of questions it is filled for."""


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """What to measure.

    Attributes:
        model: Hugging Face id, folder or GGUF file.
        data_dir: folder of `{dataset}.jsonl`.
        datasets: names; RULER-style ones are generated if there is no such file.
        methods: as in `evaluation.quality.configurations`.
        out: file of the result; records go beside it.
        ratios: see `evaluation.quality.configurations`.
        bases: see `evaluation.quality.configurations`.
        size: questions of each dataset.
        distractors: passages to keep beside those that hold the answer; None keeps all.
        top_k: first passages to keep; None keeps all.
        seed: of generated tasks and of the bootstrap.
        max_new_tokens: None is 32, and RULER's own for its tasks.
        ruler_tokens: target length of generated tasks.
        group: questions to prepare at once while the store is in memory.
        store: folder to keep passages in; None is memory.
        device: such as `cpu` or `cuda:0`.
        dtype: such as `bfloat16`.
        pool: files or a folder of JSON lines in whose passages enriched ones find their neighbours; None is among the
            passages that are prepared.
        neighbours: of each enriched passage.
        profile: file of the model's critical layers; see `FusionEngine.load`.
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
    pool: tuple[Path, ...] = ()
    neighbours: int = NEIGHBOURS
    profile: Path | None = None


def measure_quality(options: QualityOptions, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Run what is missing and write result and table; return the result as plain data.

    Records are kept in `{out}.partial.jsonl` as they come: the same options go on from there, more methods are added
    to it, other data or another model is refused.

    Args:
        options: what to measure.
        progress: called with questions `(done, total)`.

    Raises:
        QCFuseError: if something needed is missing, a dataset cannot be used, or records of other conditions are there.
        ValueError: if a method's parameter is out of range.
    """
    if options.out.suffix != ".json":
        raise QCFuseError(f"the result is JSON, its table goes beside it: call it something.json, not {options.out}")
    if not options.datasets:
        raise QCFuseError("name a dataset, or several with commas")
    rouge_scorer()
    chosen = configurations(options.methods, options.ratios, options.bases)
    _refuse_to_cut(options)
    store = MemoryStore(UNLIMITED) if options.store is None else DiskStore(options.store)
    with (
        store,
        FusionEngine.load(
            options.model, store=store, device=options.device, dtype=options.dtype, profile=options.profile
        ) as engine,
    ):
        examples, sources = read_examples(options, engine)
        notes = on_distractors(examples) if options.distractors is not None else []
        conditions = _conditions(options, engine, sources)
        with RecordLog(partial_path(options.out), conditions) as log:
            group = options.group if options.store is None else None
            pool = _pool(options)
            notes += run_questions(engine, examples, chosen, log, group=group, pool=pool, progress=progress)
            asked = {(example.dataset, example.id) for example in examples}
            records = [r for r in log.records.values() if (r["dataset"], r["id"]) in asked]
            if not records:
                raise QCFuseError("; ".join(["no question could be measured", *notes]))
            notes += on_log(log, kept=options.store is not None) + on_methods(records)
            summary = summarize(records, log.offline, _preparations(chosen), seed=options.seed)
        about = {**_about(options, engine), "conditions": conditions, "notes": notes}
    result = {"about": about, "records": records, "summary": summary}
    write_atomically(options.out, json.dumps(result, ensure_ascii=False, indent=1))
    write_atomically(options.out.with_suffix(".md"), markdown(summary, about))
    return result


def _pool(options: QualityOptions) -> NeighbourPool:
    """Return where neighbours are searched: passages as the prompts have them, titles and all."""
    files = [file for path in options.pool for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    texts = [text for file in files for example in read_dataset(file) for text in example.passages]
    return NeighbourPool(tuple(texts), options.neighbours)


def partial_path(out: Path) -> Path:
    """Return the file that records of a result are kept in."""
    return out.with_suffix(".partial.jsonl")


def read_examples(options: QualityOptions, engine: FusionEngine) -> tuple[list[Example], dict[str, str]]:
    """Read or make the questions of all datasets; return them and for each dataset the hash of where it is from.

    Raises:
        BadDataset: if there is no such dataset, or a record cannot be used.
        QCFuseError: if a generated task does not fit its length.
    """
    examples: list[Example] = []
    sources: dict[str, str] = {}
    for name in dict.fromkeys(options.datasets):
        path = options.data_dir / f"{name}.jsonl"
        if path.exists() or name not in TASKS:
            if not path.exists():
                there = ", ".join(sorted(p.stem for p in options.data_dir.glob("*.jsonl"))) or "none"
                raise BadDataset(
                    f"no dataset {name!r} in {options.data_dir}; there are {there}, and {', '.join(TASKS)}"
                )
            own = [replace(one, dataset=name) for one in read_dataset(path, size=options.size)]
            sources[name] = digest(path.read_bytes())
            if options.distractors is not None:
                # Which passages hold the answer is not guessed: a question of two steps would lose the first.
                own = [one.with_distractors(options.distractors) if one.supporting else one for one in own]
        else:
            haystack = list(dict.fromkeys(passage_texts(options.data_dir))) or _demo_texts()
            own = _generated(name, options, engine, haystack)
            sources[name] = f"generated {options.ruler_tokens} {digest(chr(0).join(haystack).encode())}"
        if options.top_k is not None:
            own = [first_passages(example, options.top_k) for example in own]
        if options.max_new_tokens is not None:
            own = [replace(example, max_new_tokens=options.max_new_tokens) for example in own]
        examples += own
    return examples, sources


def _generated(name: str, options: QualityOptions, engine: FusionEngine, haystack: Sequence[str]) -> list[Example]:
    tokenizer = engine.lm.tokenizer.backend_tokenizer

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return generate(
        name,
        options.size,
        tokens=options.ruler_tokens,
        count=count,
        haystack=haystack,
        seed=options.seed,
        overhead_tokens=len(engine.prompt("", ())),
    )


def _refuse_to_cut(options: QualityOptions) -> None:
    """Refuse to keep the first passages of a generated task only: part of the answer would go with the others."""
    made = [one for one in options.datasets if one in TASKS and not (options.data_dir / f"{one}.jsonl").exists()]
    if made and options.top_k is not None:
        raise QCFuseError(
            f"--top-k would cut away part of what {made[0]} hides; run it apart, its length is --ruler-tokens"
        )


def _demo_texts() -> list[str]:
    from qcfuse_rag.bundled import corpus

    return list(corpus().values())


def _conditions(options: QualityOptions, engine: FusionEngine, sources: dict[str, str]) -> dict[str, Any]:
    """Return what records depend on; methods and the number of questions may change."""
    return {
        "model": engine.lm.fingerprint.digest,
        "device": str(engine.lm.device),
        "critical_layers": engine.lm.critical_layers,
        "datasets": sources,
        "distractors": options.distractors,
        "top_k": options.top_k,
        "seed": options.seed,
        "max_new_tokens": options.max_new_tokens,
        "group": options.group if options.store is None else None,
        **({"pool": [path.name for path in options.pool]} if options.pool else {}),
        **({"neighbours": options.neighbours} if options.neighbours != NEIGHBOURS else {}),
    }


def _preparations(chosen: Sequence[Configuration]) -> dict[tuple[str, str | None, float | None], str | None]:
    needed = {one.key: preparation_of(one) for one in chosen}
    return {key: one.name if one is not None else None for key, one in needed.items()}


def _about(options: QualityOptions, engine: FusionEngine) -> dict[str, Any]:
    return {
        **about_run(engine.lm, options.model),
        "options": json.loads(json.dumps(asdict(options), default=str)),
    }


def on_distractors(examples: Sequence[Example]) -> list[str]:
    """Say how many questions keep all their passages though fewer were asked for."""
    silent = sum(not example.supporting and example.dataset not in TASKS for example in examples)
    return [f"{silent} questions do not say which passages hold the answer; they keep all"] if silent else []


def on_log(log: RecordLog, *, kept: bool) -> list[str]:
    """Say what of the records that were there could not be used.

    Args:
        log: after the run.
        kept: the store is one that earlier runs filled too.
    """
    notes = []
    if log.damaged:
        numbers = ", ".join(map(str, log.damaged))
        notes.append(f"{log.path}: damaged and left out: line {numbers}; records that were there are made anew")
    if log.outdated:
        old = "; passages that the --store had enriched or captured before are used as they are" if kept else ""
        notes.append(
            f"{log.outdated} records of enriched or captured passages were made anew: the earlier ones were made, or "
            f"may have been, beside the passages of other questions, as with another --size{old}"
        )
    return notes


def on_methods(records: Iterable[Record]) -> list[str]:
    """Say what a method was measured without, and where it was not what was measured."""
    asked, as_full_prefill = Counter[str](), Counter[str]()
    for record in records:
        asked[record["method"]] += 1
        as_full_prefill[record["method"]] += (record.get("fallback") or "").startswith(IN_FULL)
    notes = [
        f"{method}: {count} of {asked[method]} answers were computed in full, as its guard found that no slower; "
        "[guard=false] measures what it does otherwise"
        for method, count in as_full_prefill.items()
        if count
    ]
    if not any(method_name(method) == "relaycaching" for method in asked):
        return notes
    return [
        *notes,
        "relaycaching: no passage here is a text that was generated before, which is what it is made for; measured is "
        "how it repairs the stored caches of its base",
    ]
