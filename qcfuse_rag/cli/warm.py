"""`qcfuse warm plan|run|resume|prefix`: split documents into passages, index them, and prefill them into the store.

`prefix` prefills a system message and an agent's tools.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from qcfuse_rag.cli.console import OUT, duration, print_json, print_line, print_note, progress_bar, size, status
from qcfuse_rag.cli.library import open_engine, passage_bytes, with_settings
from qcfuse_rag.cli.options import WORDING, CorpusOptions, JobOptions, PrefixOptions
from qcfuse_rag.cluster.workers import RayWorkers, embed_on_ray, read_on_ray
from qcfuse_rag.declared_options import declared_options
from qcfuse_rag.engine.config import EngineConfig
from qcfuse_rag.engine.corpus import MIN_TOKENS
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.library.documents import index_passages, vanished_files
from qcfuse_rag.library.embedder import Embedder
from qcfuse_rag.library.files import Unread, add_unread
from qcfuse_rag.library.folder import (
    KV_FOLDER,
    existing_store_folder,
    has_secret,
    index_folder,
    open_library_store,
    own_paths,
    refuse_store,
)
from qcfuse_rag.library.index import PassageIndex, RetrievalLog, embedder_source
from qcfuse_rag.library.jobs import JobRecord, job_lock
from qcfuse_rag.library.readers import FILES, NO_TEXT, PassagesBySource, check_paths, read_passages
from qcfuse_rag.library.settings import LibrarySettings, embedder_name, model_name
from qcfuse_rag.methods import choose_method
from qcfuse_rag.server.protocol.chat_request import ToolSpec
from qcfuse_rag.store.backends.disk import read_settings
from qcfuse_rag.store.backends.remote import url_without_secrets
from qcfuse_rag.store.factory import DEFAULT_KV_DTYPE, open_store
from qcfuse_rag.store.quantization import check_kv_dtype

CONFIG_NAMES = (*WORDING, "base")  # the fields of `EngineConfig` that the record of a job keeps
EMBEDDING_BATCH = 256  # passages to embed together on this machine, at least
MAX_PRINTED_REASONS, MAX_PRINTED_PATHS = 20, 10  # maximum lines printed for what is left out, and paths in one of them


def plan_warming(library: Path, config: EngineConfig, corpus: CorpusOptions, *, as_json: bool) -> None:
    """Print the bytes and seconds that warming would take, without storing anything."""
    refuse_store(library)
    _check_paths(corpus, library)
    if corpus.kv_dtype is not None:
        check_kv_dtype(corpus.kv_dtype)
    settings = LibrarySettings.load(library)
    config = with_settings(config, settings)
    limit = None if corpus.limit_gb is None else int(corpus.limit_gb * 1e9)
    if (library / KV_FOLDER).is_dir():
        opened = open_library_store(library, tenant=corpus.tenant)
    else:
        opened = open_store(memory_bytes=limit or 64 << 30, kv_dtype=DEFAULT_KV_DTYPE)
    with opened as store:
        store.kv_dtype = corpus.kv_dtype or store.kv_dtype  # changes this open view only, not the settings on disk
        engine = open_engine(store, config, settings, method=choose_method(base=config.base))
        unread: Unread = {}
        passages = _read(engine, library, corpus, unread)
        _require_passages(passages, corpus)
        pairs = [(source, text) for source, texts in passages.items() for text in texts]
        chunk_ids = [engine.prompts.chunk_ids(text) for _, text in pairs]
        plan = engine.corpus.warm_job(chunk_ids, batch_tokens=corpus.batch_tokens).plan(measure=True, limit_bytes=limit)
        lengths, caches = [*map(len, set(chunk_ids))], len(engine.corpus.bases)
        stored = passage_bytes(engine.lm, lengths, caches)
    failed = [(pairs[index][0], reason) for index, reason in plan.failed]
    documents = sum(map(bool, passages.values()))
    free = shutil.disk_usage(library if library.exists() else Path.cwd()).free
    if as_json:
        counts = {"documents": documents, "passages": len(pairs), "unread": unread}
        print_json({**counts, **plan.to_dict(), "failed": failed, "disk_free_bytes": free, "all_bytes": stored})
        return
    print_line(
        f"{documents} documents, {len(pairs)} passages: {plan.to_warm} caches to prefill ({plan.tokens:,} tokens), "
        f"{plan.present} there already"
    )
    OUT.print(f"would take {size(plan.size_bytes)} of {size(free)} free, and about {duration(plan.seconds or 0.0)}")
    sizes = (f"{size(taken)} as {name} ({size(taken / sum(lengths))} per token)" for name, taken in stored.items())
    print_line(f"all passages, in {caches} cache(s) of each: {', '.join(sizes)}")
    if plan.left_out:
        OUT.print(f"[yellow]{plan.left_out} caches do not fit the store's limit[/yellow]; raise --limit-gb")
    _print_reasons(failed, unread)


def run_warming(library: Path, config: EngineConfig, corpus: CorpusOptions, job: JobOptions, *, as_json: bool) -> None:
    """Read, index and prefill documents; a repeated job skips caches that are already stored."""
    summary, engine = run_job(library, config, corpus, job)
    if as_json:
        print_json(summary)
        return
    _print_summary(summary)
    if engine.verdict is None:
        tenant = ["--tenant", corpus.tenant] if corpus.tenant else []
        command = shlex.join(["qcfuse", "verify", "--quick", "--store", str(library), *tenant])
        about = "finds the share to recompute at which answers on these passages are near full prefill's"
        print_line(f"`{command}` {about}")


def run_job(
    library: Path, config: EngineConfig, corpus: CorpusOptions, job: JobOptions, *, recorded: bool = True
) -> tuple[dict[str, Any], FusionEngine]:
    """Warm documents and keep a record of the job; return its summary, and the engine over the store, now closed."""
    refuse_store(library)
    _check_paths(corpus, library, allow_empty=job.allow_empty)
    settings = LibrarySettings.load(library)
    config = with_settings(config, settings)
    _require_dtype(config, job)
    paths = [str(path.resolve() if path.exists() else path) for path in corpus.paths]
    remote = job.remote and url_without_secrets(job.remote)
    model, embedder = (value and model_name(value) for value in (config.model, job.embedder))
    named = {"paths": paths, "remote": remote, "model": model, "embedder": embedder}
    shown = {name: getattr(config, name) for name in CONFIG_NAMES}
    record = JobRecord(library if recorded else None, {**shown, **asdict(corpus), **asdict(job), **named})
    with job_lock(library):
        try:
            summary, engine = _warm(settings, config, corpus, job, record)
        except KeyboardInterrupt:
            if record.begun:  # otherwise the record of the previous job stays, for `resume`
                record.finish("interrupted")
            raise
        except Exception as error:
            if record.begun:
                record.finish("failed", error=str(error))
            raise
        record.finish("finished", summary=summary)
    return summary, engine


def resume_warming(library: Path, named: Mapping[str, str | None], *, as_json: bool) -> None:
    """Run a library's last job again with the same options, but for those that the user has to name.

    Whoever writes to the folder can change the record, and a model of sentence-transformers or a Ray cluster can have
    this process run code.
    """
    try:
        arguments = dict(JobRecord.load(library).arguments)
        for name, given in named.items():
            if given is None and arguments[name] is not None:
                raise QCFuseError(f"the last job had --{name} {arguments[name]}; if you trust that, name it here too")
        arguments |= named
        arguments["paths"] = [Path(path) for path in arguments["paths"]]
        corpus = CorpusOptions(**{name: arguments.pop(name) for name in declared_options(CorpusOptions)})
        config = EngineConfig(**{name: arguments.pop(name) for name in CONFIG_NAMES})
        job = JobOptions(**arguments)
    except (TypeError, KeyError, ValueError) as error:
        raise QCFuseError(
            f"cannot read the record of the last job ({error}); start it with `qcfuse warm run`"
        ) from error
    run_warming(library, config, corpus, job, as_json=as_json)


def _warm(
    settings: LibrarySettings, config: EngineConfig, corpus: CorpusOptions, job: JobOptions, record: JobRecord
) -> tuple[dict[str, Any], FusionEngine]:
    """Run a job; return its summary and its engine."""
    library, embedder = settings.folder, embedder_name(job.embedder)
    opened = open_library_store(
        library,
        kv_dtype=corpus.kv_dtype,
        limit_gb=corpus.limit_gb,
        tenant=corpus.tenant,
        encrypt=job.encrypt,
        remote=job.remote,
    )
    with opened as store:
        folder = index_folder(library, store)
        index = PassageIndex.load(folder, embedder) if folder.exists() else PassageIndex(embedder)
        embed = Embedder(embedder_source(embedder)) if job.ray is None else None  # the model takes longer to load
        engine = open_engine(store, config, settings, method=choose_method(base=config.base))
        workers = _ray_workers(engine, library, config, corpus, job)
        unread: Unread = {}
        passages = _read(engine, library, corpus, unread, workers)
        if not index.passages:
            _require_passages(passages, corpus)
        record.save()
        template = engine.prompts.template
        settings.after_job(engine.lm.fingerprint, template, model=config.model, base=config.base).save()
        vanished = vanished_files(index, corpus.paths, passages)
        for source in vanished:  # before the index drops them: a later job could no longer see that they vanished
            engine.forget(source)
        index.remove(vanished)
        _index(index, folder, passages, embed, workers)
        for source in vanished:  # again: a server may have found it in the old index and brought it back
            engine.forget(source)
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
                access=None if job.access is None else dict.fromkeys(passages, job.access),
                batch_tokens=corpus.batch_tokens,
                progress=advance_both,
                workers=workers,
            )
        engine.corpus.close()
    counts = {"documents": sum(map(bool, documents.values())), "passages": len(texts), "unread": unread}
    failed = [(pairs[index][0], reason) for index, reason in summary.failed]
    note = None if embed is None else embed.script_note(texts)
    return {**counts, **summary.to_dict(), "failed": failed, "script_note": note}, engine


def _check_paths(corpus: CorpusOptions, library: Path, *, allow_empty: bool = False) -> None:
    hint = "; if all were deleted, `warm run --allow-empty` forgets them" if library.is_dir() else ""
    check_paths(corpus.paths, corpus.reader, own_paths(library), if_empty=None if allow_empty else hint)


def _read(
    engine: FusionEngine, library: Path, corpus: CorpusOptions, unread: Unread, workers: RayWorkers | None = None
) -> PassagesBySource:
    """Read and split the documents of a job, without the library's own files, which may be among them."""
    own = own_paths(library)
    with progress_bar("reading documents", "KB" if workers is None else "files") as advance:
        read = partial(read_passages, tokenizer=engine.lm.tokenizer, reader=corpus.reader)
        if corpus.reader == FILES and workers is not None:
            read = partial(read_on_ray, workers)
        passages = read(corpus.paths, max_tokens=corpus.max_tokens, skip=own, progress=advance, unread=unread)
    for source in (source for source, texts in passages.items() if not texts):
        if Path(source).is_absolute():
            add_unread(unread, corpus.paths, NO_TEXT, Path(source))
        else:
            unread.setdefault(NO_TEXT, []).append(source)
    return passages


def _index(
    index: PassageIndex, folder: Path, passages: PassagesBySource, embedder: Embedder | None, workers: RayWorkers | None
) -> None:
    at_once, embed = EMBEDDING_BATCH, None if embedder is None else embedder.windows
    if workers is not None:
        at_once, embed = at_once * 16 * workers.count, partial(embed_on_ray, workers, embedder_source(index.embedder))
    assert embed is not None  # without workers
    if index.outdated:
        print_note("note:", "an earlier version indexed the beginnings of passages; they are indexed anew, whole")
    with progress_bar("indexing passages", "passages") as advance:
        index_passages(index, folder, passages, embed, at_once=at_once, progress=advance)


def _require_passages(passages: PassagesBySource, corpus: CorpusOptions) -> None:
    if not any(passages.values()):
        raise QCFuseError(f"there are no passages in {', '.join(map(str, corpus.paths))}")


def _require_dtype(config: EngineConfig, job: JobOptions) -> None:
    """Require a dtype if GPU workers would otherwise take the dtype of this machine's CPU."""
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpu_workers = job.ray is not None and job.gpus_per_worker > 0
    if gpu_workers and config.dtype is None and not device.startswith("cuda"):
        raise QCFuseError(
            "the workers have GPUs, but this machine computes on a CPU, in a dtype that the workers would take too: "
            "give `qcfuse warm run` the --dtype of the machine that answers, such as bfloat16"
        )


def _ray_workers(
    engine: FusionEngine, library: Path, config: EngineConfig, corpus: CorpusOptions, job: JobOptions
) -> RayWorkers | None:
    if job.ray is None:
        return None
    if corpus.tenant is not None or job.encrypt or has_secret(library):
        raise QCFuseError("secrets do not leave this machine: warm without --ray, or unset QCFUSE_SECRET")
    store_settings: dict[str, Any] = {"folder": str((library / KV_FOLDER).resolve())}
    settings = read_settings(library / KV_FOLDER)
    remote = job.remote if job.remote is not None else settings and settings.remote
    if remote:
        store_settings = {"remote": remote, "kv_dtype": engine.store.kv_dtype, "ttl_s": engine.store.ttl_s}
    return RayWorkers(
        model=config.model,
        store=store_settings,
        address=job.ray,
        count=job.workers,
        cpus=job.cpus_per_worker,
        gpus=job.gpus_per_worker,
        device=config.device if job.gpus_per_worker == 0 else "cuda",
        dtype=str(engine.lm.dtype).removeprefix("torch."),
        weights=config.weights or "model",
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
    print_left_out(summary)
    if summary["script_note"] is not None:
        print_note("note:", summary["script_note"])


def print_left_out(summary: Mapping[str, Any]) -> None:
    """Print what a job has not stored, and each reason why files were passed over."""
    if summary["left_out"]:
        print_note(f"{summary['left_out']} caches left out:", "they do not fit the store; raise --limit-gb")
    _print_reasons(summary["failed"], summary["unread"])


def _print_reasons(failed: Sequence[tuple[str, str]], unread: Unread) -> None:
    not_stored = [f"a passage of {source}: {reason}" for source, reason in failed]
    passed_over = [f"{reason}: {_list(paths)}" for reason, paths in unread.items()]
    for label, reasons in (("not stored:", not_stored), ("passed over:", passed_over)):
        for reason in reasons[:MAX_PRINTED_REASONS]:
            print_note(label, reason)
        if len(reasons) > MAX_PRINTED_REASONS:
            print_note(f"and {len(reasons) - MAX_PRINTED_REASONS:,} more:", "--json lists all")


def _list(paths: Sequence[str]) -> str:
    more = len(paths) - MAX_PRINTED_PATHS
    return ", ".join(paths[:MAX_PRINTED_PATHS]) + (f" and {more:,} more (--json lists all)" if more > 0 else "")


def warm_prefix(library: Path, config: EngineConfig, options: PrefixOptions, *, as_json: bool) -> None:
    """Prefill the system prefix of the conversations that have this system message and these tools."""
    tools = [] if options.tools is None else read_tools(options.tools)
    if options.system is None and not tools:
        raise QCFuseError("there is nothing to prefill: give --system, --tools or both")
    existing_store_folder(library)
    settings = LibrarySettings.load(library)
    config = with_settings(config, settings)
    with open_library_store(library, tenant=options.tenant) as store:
        engine = open_engine(store, config, settings, method=choose_method())
        with status("prefilling"):
            summary = engine.warm_prefix(options.system, tools)
        engine.corpus.close()
    if not summary.chunks:
        raise QCFuseError(
            f"nothing is prefilled: conversations begin with fewer than {MIN_TOKENS} tokens, or the chat template "
            "writes their beginning anew for each"
        )
    if as_json:
        print_json(summary.to_dict())
        return
    print_line(
        f"{summary.warmed} beginnings of conversations prefilled ({summary.tokens:,} tokens, "
        f"{size(summary.size_bytes)}), {summary.present} were there already"
    )
    for _, reason in summary.failed:
        print_note("not stored:", reason)


def read_tools(path: Path) -> list[dict[str, Any]]:
    """Read tools in OpenAI's form from a JSON file, and return them as the server gives them to the chat template."""
    try:
        tools = json.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise QCFuseError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise QCFuseError(f"{path} is not JSON: {error}") from error
    try:
        specs = TypeAdapter(list[ToolSpec]).validate_python(tools)
    except ValidationError as error:
        raise QCFuseError(
            f"{path} has to be a list of tools, as requests give them: "
            '[{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}]'
        ) from error
    return [spec.model_dump(exclude_none=True) for spec in specs]
