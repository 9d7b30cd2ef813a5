"""`qcfuse warm plan|run|resume`: documents in, caches kept."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from qcfuse_rag.bundled import default_model
from qcfuse_rag.cli.console import ERR, OUT, duration, print_json, progress_bar, size
from qcfuse_rag.cli.documents import check_paths, index_passages, read_documents, require_passages, vanished_files
from qcfuse_rag.cli.job import JobRecord, WarmOptions, only_job
from qcfuse_rag.cli.library import (
    DEFAULT_EMBEDDER,
    KV_FOLDER,
    index_folder,
    is_encrypted,
    open_kv,
    require_library,
)
from qcfuse_rag.cli.open_engine import open_engine
from qcfuse_rag.cluster.workers import RayWorkers
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.methods import choose_method
from qcfuse_rag.retrieval.index import PassageIndex
from qcfuse_rag.retrieval.retrieval_log import RetrievalLog
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.backends.disk_settings import kept_settings
from qcfuse_rag.store.backends.remote import lasting_url
from qcfuse_rag.store.factory import open_store

MOST_REASONS = 20
"""Lines on a terminal that say what was passed over."""


def plan_warming(library: Path, options: WarmOptions, *, as_json: bool) -> None:
    """Say what warming would take, without storing anything."""
    require_library(library)
    check_paths(options, library)
    limit = None if options.limit_gb is None else int(options.limit_gb * 1e9)
    exists = (library / KV_FOLDER).is_dir()
    with open_kv(library, tenant=options.tenant) if exists else open_store(memory_bytes=limit or 64 << 30) as store:
        store.numbers = options.numbers or store.numbers  # of this view only: a plan changes nothing
        engine = open_engine(store, options.model, choose_method(base=options.base), options.device, options.dtype)
        unread: list[str] = []
        passages = read_documents(engine, options, unread)
        require_passages(passages, options)
        documents, texts = _with_text(passages), [text for own in passages.values() for text in own]
        job = engine.warm_job(_ids(engine, texts), batch_tokens=options.batch_tokens)
        plan = job.plan(measure=True, limit_bytes=limit)
    free = shutil.disk_usage(library if library.exists() else Path.cwd()).free
    if as_json:
        about = {"documents": documents, "passages": len(texts), "unread": unread}
        print_json({**about, **plan.to_dict(), "disk_free_bytes": free})
        return
    OUT.print(
        f"{documents} documents, {len(texts)} passages: {plan.to_warm} caches to prefill ({plan.tokens:,} tokens), "
        f"{plan.present} there already",
        soft_wrap=True,
    )
    OUT.print(f"would take {size(plan.size_bytes)} of {size(free)} free, and about {duration(plan.seconds or 0.0)}")
    if plan.left_out:
        OUT.print(f"[yellow]{plan.left_out} caches do not fit the store's limit[/yellow]; raise --limit-gb")
    _print_failed(plan.failed)
    _print_unread(unread)


def run_warming(library: Path, options: WarmOptions, *, as_json: bool) -> None:
    """Read, index and prefill documents; what a job that stopped has done is not done again."""
    require_library(library)
    check_paths(options, library)
    _require_dtype(options)
    paths = [str(Path(path).resolve()) if Path(path).exists() else path for path in options.paths]
    remote = options.remote and lasting_url(options.remote)
    record = JobRecord(library, {**asdict(options), "paths": paths, "remote": remote})
    with only_job(library):
        try:
            summary = _warm(library, options, record)
        except (KeyboardInterrupt, Exception) as error:
            stopped = isinstance(error, KeyboardInterrupt)
            if record.begun:  # one that never began leaves the record of the last one, for `resume`
                record.finish("interrupted" if stopped else "failed", error=None if stopped else str(error))
            raise
        record.finish("finished", summary=summary)
    if as_json:
        print_json(summary)
        return
    OUT.print(
        f"{summary['documents']} documents, {summary['passages']} passages: {summary['warmed']} caches prefilled "
        f"({summary['tokens']:,} tokens, {size(summary['size_bytes'])}) in {duration(summary['elapsed_s'])}, "
        f"{summary['present']} were there already",
        soft_wrap=True,
    )
    if summary["refreshed"] or summary["stalest"]:
        OUT.print(
            f"{summary['refreshed']} of them anew, since their neighbours are others by now; of those left, none lacks "
            f"more than {summary['stalest']:.0%} of its neighbours",
            soft_wrap=True,
        )
    if summary["left_out"]:
        ERR.print(
            f"[yellow]{summary['left_out']} caches left out[/yellow]: they do not fit the store; raise --limit-gb"
        )
    _print_failed(summary["failed"])
    _print_unread(summary["unread"])


def resume_warming(library: Path, *, as_json: bool) -> None:
    """Run a library's last job again with the options it had.

    Raises:
        QCFuseError: if there was none.
    """
    try:
        given = JobRecord.load(library).arguments
        options = WarmOptions(**{**given, "paths": tuple(given["paths"])})
    except (TypeError, KeyError) as error:
        raise QCFuseError(
            f"cannot read the record of the last job ({error}); start it with `qcfuse warm run`"
        ) from error
    run_warming(library, options, as_json=as_json)


def _warm(library: Path, options: WarmOptions, record: JobRecord) -> dict[str, Any]:
    with _open(library, options) as store:
        engine = open_engine(store, options.model, choose_method(base=options.base), options.device, options.dtype)
        workers = _workers(engine, library, options)
        unread: list[str] = []
        passages = read_documents(engine, options, unread, workers)
        place, name = index_folder(library, store), options.embedder or DEFAULT_EMBEDDER
        index = PassageIndex.load(place, name) if place.exists() else PassageIndex(name)
        if not index.passages:
            require_passages(passages, options)
        record.save()
        vanished = vanished_files(index, options, passages)
        for source in vanished:  # first: what is no longer in the index is not seen to have vanished
            engine.forget(source)
        index.remove(vanished)
        index_passages(index, place, passages, options, workers)
        enriched = any(base.enriched for base in engine.bases)
        # Neighbours come from the whole index, and a new document may be one to old passages.
        documents = index.by_source() if enriched else passages
        pairs = [(source, text) for source, texts in documents.items() for text in texts]
        texts = [text for _, text in pairs]
        log = RetrievalLog(place)
        with progress_bar("prefilling passages", "tokens") as advance:

            def note(done: int, total: int) -> None:
                advance(done, total)
                record.advance(done, total)

            summary = engine.warm(
                texts,
                sources=[source for source, _ in pairs],
                priority=log.counts(texts),
                vectors=index.vectors(texts) if enriched else None,
                retrievals=log.retrievals(texts) if enriched else (),
                access=None if options.access is None else dict.fromkeys(passages, options.access),
                batch_tokens=options.batch_tokens,
                progress=note,
                workers=workers,
            )
        engine.sources.close()
    return {"documents": _with_text(documents), "passages": len(texts), "unread": unread, **summary.to_dict()}


def _require_dtype(options: WarmOptions) -> None:
    """Complain of workers on GPUs that would be told to compute in what a machine without one computes in.

    Raises:
        QCFuseError: if a dtype has to be named.
    """
    here = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpus = options.ray is not None and options.gpus_per_worker > 0
    if on_gpus and options.dtype is None and not here.startswith("cuda"):
        raise QCFuseError(
            "the workers have GPUs and this machine computes in float32 on a CPU, as they would then: "
            "give `qcfuse warm run` the --dtype of who will answer, such as bfloat16"
        )


def _workers(engine: FusionEngine, library: Path, options: WarmOptions) -> RayWorkers | None:
    """Return the workers that were asked for; each opens the store as this process did."""
    if options.ray is None:
        return None
    if options.tenant is not None or options.encrypt or is_encrypted(library):
        raise QCFuseError("secrets do not leave this machine: a tenant's or an encrypted store is warmed without --ray")
    shared: dict[str, Any] = {"folder": str((library / KV_FOLDER).resolve())}
    kept = kept_settings(library / KV_FOLDER)
    remote = options.remote if options.remote is not None else kept and kept.remote
    if remote:
        shared = {"remote": remote, "numbers": engine.store.numbers}
    return RayWorkers(
        model=options.model or default_model(),
        store=shared,
        address=options.ray,
        count=options.workers,
        cpus=options.cpus_per_worker,
        gpus=options.gpus_per_worker,
        device=options.device if options.gpus_per_worker == 0 else "cuda",
        dtype=str(engine.lm.dtype).removeprefix("torch."),
    )


def _open(library: Path, options: WarmOptions) -> KVStore:
    return open_kv(
        library,
        numbers=options.numbers,
        limit_gb=options.limit_gb,
        tenant=options.tenant,
        encrypt=options.encrypt,
        remote=options.remote,
    )


def _ids(engine: FusionEngine, texts: list[str]) -> list[tuple[int, ...]]:
    return [engine.prompts.chunk_ids(text) for text in texts]


def _print_failed(failed: Any) -> None:
    for index, reason in failed:
        ERR.print(f"[yellow]not stored[/yellow] passage {index}: {escape(reason)}", highlight=False, soft_wrap=True)


def _with_text(documents: Mapping[str, Sequence[str]]) -> int:
    """Return how many documents have a passage."""
    return sum(map(bool, documents.values()))


def _print_unread(unread: list[str]) -> None:
    for reason in unread[:MOST_REASONS]:
        ERR.print(f"[yellow]passed over:[/yellow] {escape(reason)}", highlight=False, soft_wrap=True)
    if len(unread) > MOST_REASONS:
        ERR.print(f"[yellow]and {len(unread) - MOST_REASONS:,} more[/yellow]: --json names them all", highlight=False)
