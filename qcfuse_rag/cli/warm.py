"""`qcfuse warm plan|run|resume`: split documents into passages, index them, and prefill them into the store."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qcfuse_rag.bundled import default_model
from qcfuse_rag.cli.console import OUT, duration, print_json, print_line, print_note, progress_bar, size
from qcfuse_rag.cli.library import open_engine, with_settings
from qcfuse_rag.cli.options import CorpusOptions, WarmOptions, WeightsChoice
from qcfuse_rag.cluster.workers import RayWorkers
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.library.documents import index_passages, vanished_files
from qcfuse_rag.library.embedder import Embedder
from qcfuse_rag.library.folder import (
    KV_FOLDER,
    has_secret,
    index_folder,
    open_library_store,
    own_folders,
    refuse_store,
)
from qcfuse_rag.library.index import DEFAULT_EMBEDDER, PassageIndex, RetrievalLog, embedder_source
from qcfuse_rag.library.jobs import JobRecord, job_lock
from qcfuse_rag.library.readers import FILES, PassagesBySource, check_paths, read_passages, skipped_files
from qcfuse_rag.library.settings import LibrarySettings, model_name
from qcfuse_rag.methods import choose_method
from qcfuse_rag.store.backends.disk_settings import read_settings
from qcfuse_rag.store.backends.remote import url_without_secrets
from qcfuse_rag.store.factory import KEPT_NUMBERS, open_store
from qcfuse_rag.store.quantization import check_numbers

EMBEDDING_BATCH = 256  # passages to embed together on this machine, at least
MAX_PRINTED_REASONS = 20  # maximum number of lines printed for input that was not read


def plan_warming(library: Path, options: CorpusOptions, *, as_json: bool) -> None:
    """Print the bytes and seconds that warming would take, without storing anything."""
    refuse_store(library)
    _check_paths(options, library)
    if options.numbers is not None:
        check_numbers(options.numbers)
    settings = LibrarySettings.load(library)
    options = with_settings(options, settings)
    limit = None if options.limit_gb is None else int(options.limit_gb * 1e9)
    if (library / KV_FOLDER).is_dir():
        opened = open_library_store(library, tenant=options.tenant)
    else:
        opened = open_store(memory_bytes=limit or 64 << 30, numbers=KEPT_NUMBERS)
    with opened as store:
        store.numbers = options.numbers or store.numbers  # changes this open view only, not the settings on disk
        engine = open_engine(store, choose_method(base=options.base), options, settings)
        unread: list[str] = []
        passages = _read(engine, library, options, unread)
        _require_passages(passages, options)
        pairs = [(source, text) for source, texts in passages.items() for text in texts]
        chunk_ids = [engine.prompts.chunk_ids(text) for _, text in pairs]
        plan = engine.corpus.warm_job(chunk_ids, batch_tokens=options.batch_tokens).plan(
            measure=True, limit_bytes=limit
        )
    failed = [(pairs[index][0], reason) for index, reason in plan.failed]
    documents = _count_with_text(passages)
    free = shutil.disk_usage(library if library.exists() else Path.cwd()).free
    if as_json:
        counts = {"documents": documents, "passages": len(pairs), "unread": unread}
        print_json({**counts, **plan.to_dict(), "failed": failed, "disk_free_bytes": free})
        return
    print_line(
        f"{documents} documents, {len(pairs)} passages: {plan.to_warm} caches to prefill ({plan.tokens:,} tokens), "
        f"{plan.present} there already"
    )
    OUT.print(f"would take {size(plan.size_bytes)} of {size(free)} free, and about {duration(plan.seconds or 0.0)}")
    if plan.left_out:
        OUT.print(f"[yellow]{plan.left_out} caches do not fit the store's limit[/yellow]; raise --limit-gb")
    _print_failed(failed)
    _print_unread(unread)


def run_warming(library: Path, options: WarmOptions, *, as_json: bool) -> None:
    """Read, index and prefill documents; a repeated job skips caches that are already stored."""
    refuse_store(library)
    _check_paths(options, library, allow_empty=options.allow_empty)
    settings = LibrarySettings.load(library)
    options = with_settings(options, settings)
    _require_dtype(options)
    paths = [str(path.resolve() if path.exists() else path) for path in options.paths]
    remote = options.remote and url_without_secrets(options.remote)
    model, embedder = (value and model_name(value) for value in (options.model, options.embedder))
    recorded = {"paths": paths, "remote": remote, "model": model, "embedder": embedder}
    record = JobRecord(library, {**asdict(options), **recorded})
    with job_lock(library):
        try:
            summary, verified = _warm(settings, options, record)
        except KeyboardInterrupt:
            if record.begun:  # otherwise the record of the previous job stays, for `resume`
                record.finish("interrupted")
            raise
        except Exception as error:
            if record.begun:
                record.finish("failed", error=str(error))
            raise
        record.finish("finished", summary=summary)
    if as_json:
        print_json(summary)
        return
    _print_summary(summary)
    if not verified:
        _print_offer(library, options)


def resume_warming(library: Path, *, as_json: bool) -> None:
    """Run a library's last job again with the same options."""
    try:
        # Older records do not name the first two.
        arguments = {"weights": None, "chat_template_kwargs": None, **JobRecord.load(library).arguments}
        if missing := {field.name for field in fields(CorpusOptions)} - arguments.keys():
            raise KeyError(", ".join(sorted(missing)))
        weights = arguments["weights"] and WeightsChoice(arguments["weights"])
        paths = [Path(path) for path in arguments["paths"]]
        options = WarmOptions(**{**arguments, "paths": paths, "weights": weights})
    except (TypeError, KeyError, ValueError) as error:
        raise QCFuseError(
            f"cannot read the record of the last job ({error}); start it with `qcfuse warm run`"
        ) from error
    run_warming(library, options, as_json=as_json)


def _warm(settings: LibrarySettings, options: WarmOptions, record: JobRecord) -> tuple[dict[str, Any], bool]:
    """Run a job; return its summary, and whether the library has a verdict on the method that reads its caches."""
    library = settings.folder
    opened = open_library_store(
        library,
        numbers=options.numbers,
        limit_gb=options.limit_gb,
        tenant=options.tenant,
        encrypt=options.encrypt,
        remote=options.remote,
    )
    with opened as store:
        engine = open_engine(store, choose_method(base=options.base), options, settings)
        workers = _ray_workers(engine, library, options)
        unread: list[str] = []
        passages = _read(engine, library, options, unread, workers)
        folder = index_folder(library, store)
        embedder = None if options.embedder is None else model_name(options.embedder)
        index = PassageIndex.load(folder, embedder) if folder.exists() else PassageIndex(embedder or DEFAULT_EMBEDDER)
        if not index.passages:
            _require_passages(passages, options)
        record.save()
        template = engine.prompts.template
        settings.after_job(engine.lm.fingerprint, template, model=options.model, base=options.base).save()
        vanished = vanished_files(index, options.paths, passages)
        for source in vanished:  # before the index drops them: a later job could no longer see that they vanished
            engine.forget(source)
        index.remove(vanished)
        _index(index, folder, passages, workers)
        derived = any(base.derived for base in engine.corpus.bases)
        # Entries may be derived from passages of the whole index, so a new document can change old passages.
        documents = index.by_source() if derived else passages
        pairs = [(source, text) for source, texts in documents.items() for text in texts]
        texts = [text for _, text in pairs]
        log = RetrievalLog(folder)
        with suppress(OSError):  # a library that cannot be written and is warm already stays as it is
            log.keep_only(text for source_texts in index.by_source().values() for text in source_texts)
        with progress_bar("prefilling passages", "tokens") as advance:

            def advance_both(done: int, total: int) -> None:
                advance(done, total)
                record.advance(done, total)

            summary = engine.warm(
                texts,
                sources=[source for source, _ in pairs],
                priority=log.counts(texts),
                vectors=index.vectors(texts) if derived else None,
                retrievals=log.retrievals(texts) if derived else (),
                access=None if options.access is None else dict.fromkeys(passages, options.access),
                batch_tokens=options.batch_tokens,
                progress=advance_both,
                workers=workers,
            )
        engine.corpus.close()
    counts = {"documents": _count_with_text(documents), "passages": len(texts), "unread": unread}
    failed = [(pairs[index][0], reason) for index, reason in summary.failed]
    return {**counts, **summary.to_dict(), "failed": failed}, engine.verdict is not None


def _check_paths(options: CorpusOptions, library: Path, *, allow_empty: bool = False) -> None:
    hint = "; if all were deleted, `warm run --allow-empty` forgets them" if library.is_dir() else ""
    check_paths(options.paths, options.reader, own_folders(library), if_empty=None if allow_empty else hint)


def _read(
    engine: FusionEngine,
    library: Path,
    options: CorpusOptions,
    unread: list[str],
    workers: RayWorkers | None = None,
) -> PassagesBySource:
    """Read and split the documents of a job, without the library's own folders, which may be among them.

    Ray workers, if given, must see the files at the same paths. Files in folders that are not read are listed with the
    reason in `unread`.
    """
    own = own_folders(library)
    with progress_bar("reading documents", "files") as advance:
        read = partial(read_passages, tokenizer=engine.lm.tokenizer, reader=options.reader)
        if options.reader == FILES:
            unread.extend(skipped_files(options.paths, own))
            if workers is not None:
                from qcfuse_rag.cluster.read import read_on_ray

                read = partial(read_on_ray, workers)
        passages = read(options.paths, max_tokens=options.max_tokens, skip=own, progress=advance, unread=unread)
    unread.extend(f"{source} has no text" for source, texts in passages.items() if not texts)
    return passages


def _index(index: PassageIndex, folder: Path, passages: PassagesBySource, workers: RayWorkers | None) -> None:
    model, at_once = embedder_source(index.embedder), EMBEDDING_BATCH
    embed: Callable[[Sequence[str]], NDArray[np.float32]]
    if workers is None:
        embed = Embedder(model)
    else:
        from qcfuse_rag.cluster.read import embed_on_ray

        at_once, embed = at_once * 16 * workers.count, partial(embed_on_ray, workers, model)
    with progress_bar("indexing passages", "passages") as advance:
        index_passages(index, folder, passages, embed, at_once=at_once, progress=advance)


def _require_passages(passages: PassagesBySource, options: CorpusOptions) -> None:
    if not any(passages.values()):
        raise QCFuseError(f"there are no passages in {', '.join(map(str, options.paths))}")


def _require_dtype(options: WarmOptions) -> None:
    """Require a dtype if GPU workers would otherwise take the dtype of this machine's CPU."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpu_workers = options.ray is not None and options.gpus_per_worker > 0
    if gpu_workers and options.dtype is None and not device.startswith("cuda"):
        raise QCFuseError(
            "the workers have GPUs, but this machine computes on a CPU, in a dtype that the workers would take too: "
            "give `qcfuse warm run` the --dtype of the machine that answers, such as bfloat16"
        )


def _ray_workers(engine: FusionEngine, library: Path, options: WarmOptions) -> RayWorkers | None:
    """Return the requested Ray workers, which open the same store as this process; None without --ray."""
    if options.ray is None:
        return None
    if options.tenant is not None or options.encrypt or has_secret(library):
        raise QCFuseError("secrets do not leave this machine: warm without --ray, or unset QCFUSE_SECRET")
    store_settings: dict[str, Any] = {"folder": str((library / KV_FOLDER).resolve())}
    settings = read_settings(library / KV_FOLDER)
    remote = options.remote if options.remote is not None else settings and settings.remote
    if remote:
        store_settings = {"remote": remote, "numbers": engine.store.numbers, "ttl_s": engine.store.ttl_s}
    return RayWorkers(
        model=options.model or default_model(),
        store=store_settings,
        address=options.ray,
        count=options.workers,
        cpus=options.cpus_per_worker,
        gpus=options.gpus_per_worker,
        device=options.device if options.gpus_per_worker == 0 else "cuda",
        dtype=str(engine.lm.dtype).removeprefix("torch."),
        weights=engine.lm.fingerprint.weight_format,
    )


def _print_summary(summary: Mapping[str, Any]) -> None:
    print_line(
        f"{summary['documents']} documents, {summary['passages']} passages: {summary['warmed']} caches prefilled "
        f"({summary['tokens']:,} tokens, {size(summary['size_bytes'])}) in {duration(summary['elapsed_s'])}, "
        f"{summary['present']} were there already"
    )
    if summary["refreshed"] or summary["stalest"]:
        print_line(
            f"{summary['refreshed']} of them prefilled again, because their neighbours changed; "
            f"the others lack at most {summary['stalest']:.0%} of their neighbours"
        )
    if summary["left_out"]:
        print_note(f"{summary['left_out']} caches left out:", "they do not fit the store; raise --limit-gb")
    _print_failed(summary["failed"])
    _print_unread(summary["unread"])


def _print_offer(library: Path, options: WarmOptions) -> None:
    """Offer verification to the user of a library without a verdict."""
    named = {"--store": str(library), "--tenant": options.tenant}
    command = shlex.join(["qcfuse", "verify", *(part for pair in named.items() if pair[1] for part in pair if part)])
    print_line(f"`{command}` finds the share to recompute at which answers on these passages are near full prefill's")


def _print_failed(failed: Sequence[tuple[str, str]]) -> None:
    _print_reasons("not stored:", [f"a passage of {source}: {reason}" for source, reason in failed])


def _print_unread(unread: Sequence[str]) -> None:
    _print_reasons("passed over:", unread)


def _print_reasons(label: str, reasons: Sequence[str]) -> None:
    for reason in reasons[:MAX_PRINTED_REASONS]:
        print_note(label, reason)
    if len(reasons) > MAX_PRINTED_REASONS:
        print_note(f"and {len(reasons) - MAX_PRINTED_REASONS:,} more:", "--json lists all")


def _count_with_text(documents: Mapping[str, Sequence[str]]) -> int:
    return sum(map(bool, documents.values()))
