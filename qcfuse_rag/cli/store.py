"""`qcfuse store ...`: inspect and maintain a store."""

from __future__ import annotations

from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qcfuse_rag.cli.console import OUT, print_json, print_line, print_note, print_result, progress_bar, size
from qcfuse_rag.cli.options import Json, Tenant
from qcfuse_rag.errors import QCFuseError

if TYPE_CHECKING:
    from qcfuse_rag.store.admin import ChangeReport
    from qcfuse_rag.store.documents.sources import Sources

store_app = typer.Typer(help="Inspect and maintain a store.", no_args_is_help=True)

Folder = Annotated[Path, typer.Option("--store", help="Folder of a library or of a store.")]
Yes = Annotated[bool, typer.Option("--yes", help="Confirm; there is no further question.")]
SourceName = Annotated[str | None, typer.Option("--source", help="Document whose entries to use.")]
RemoteUrl = Annotated[
    str | None, typer.Option(help="URL of the remote behind the store, if it needs a password; other URLs are stored.")
]
Document = Annotated[str, typer.Argument(help="Name of a document.")]
Addresses = Annotated[list[str] | None, typer.Argument(help="Addresses of entries, as shown by `lookup`.")]


@store_app.command()
def stats(folder: Folder, as_json: Json = False) -> None:
    """Show the contents and the settings of a store, and what the model warmed last cannot reuse, with the reason."""
    from qcfuse_rag.library.folder import open_disk_tier
    from qcfuse_rag.library.settings import LibrarySettings
    from qcfuse_rag.models.fingerprint import Fingerprint
    from qcfuse_rag.store.admin import count_by_model

    with open_disk_tier(folder) as store:
        stats, models, settings = store.stats()[0], store.models(), asdict(store.settings)
        counts = count_by_model(store) if len(models) > 1 else dict.fromkeys(models, (stats.entries, stats.size_bytes))
    settings["encrypted"] = settings.pop("secret") is not None
    last = LibrarySettings.load(folder).fingerprint or next(reversed(models.values()), {})
    rows, lines = list[dict[str, Any]](), list[str]()
    for name, fields in models.items():
        model, (entries, size_bytes) = Fingerprint(**fields), counts.get(name, (0, 0))
        differs = model.differences(last)
        rows.append({**fields, "entries": entries, "size_bytes": size_bytes, "differs": differs})
        line = f"  model {name[:12]}: {entries:,} chunks, {size(size_bytes)}, weights {model.weights[:12]}, dtype "
        reason = f"; not reused by the model warmed last: {', '.join(differs)} differ" * bool(differs)
        lines.append(f"{line}{model.number_formats}{reason}")
    print_result(
        {**asdict(stats), "settings": settings, "models": rows},
        as_json,
        f"{stats.entries} chunks, {size(stats.size_bytes)} of {size(stats.limit_bytes or 0)}, in {store.folder}",
        "  " + ", ".join(f"{name} {settings[name]}" for name in ("kv_dtype", "eviction", "ttl_s", "encrypted")),
        *lines,
    )


@store_app.command()
def health(folder: Folder, remote: RemoteUrl = None, as_json: Json = False) -> None:
    """Test reading and writing of a store and of the remote behind it; exit with 1 on failure."""
    from shutil import disk_usage

    from qcfuse_rag.library.folder import existing_store_folder, open_disk_tier
    from qcfuse_rag.store.backends.remote import open_remote
    from qcfuse_rag.store.documents.sources import manifest_damage

    with open_disk_tier(folder) as store:
        [health_report], remote_report = store.health(), None
        if (damage := manifest_damage(existing_store_folder(folder))) is not None:
            health_report = replace(health_report, ok=False, problems=(*health_report.problems, damage))
        notes, remote = list(store.notes), remote or store.settings.remote
        [contents], free = store.stats(), disk_usage(store.folder).free
        if health_report.ok and free < (contents.limit_bytes or 0) - contents.size_bytes:
            notes.append(f"the store may grow to {size(contents.limit_bytes or 0)}, the disk has {size(free)} free")
        if remote:
            with open_remote(remote, cipher=store.cipher) as remote_store:
                [remote_report] = remote_store.health()
    ok = health_report.ok and (remote_report is None or remote_report.ok)
    if as_json:
        remote_data = None if remote_report is None else asdict(remote_report)
        print_json({**asdict(health_report), "ok": ok, "notes": notes, "remote": remote_data})
    else:
        OUT.print("[green]healthy[/green]" if ok else "[red]not healthy[/red]")
        remote_problems = () if remote_report is None else remote_report.problems
        for line in (*health_report.problems, *notes, *remote_problems):
            print_line(f"  {line}")
    if not ok:
        raise typer.Exit(1)


@store_app.command()
def fsck(folder: Folder, as_json: Json = False) -> None:
    """Check every entry, quarantine damaged entries, and make files and index agree; exit with 1 on damage."""
    from qcfuse_rag.library.folder import open_disk_tier
    from qcfuse_rag.store.admin import fsck as check_store

    with open_disk_tier(folder) as store, progress_bar("checking", "entries") as advance:
        report = check_store(store, progress=advance)
    if as_json:
        print_json({**asdict(report), "clean": report.clean})
    else:
        OUT.print(f"{report.sound} of {report.checked} entries sound, {size(report.reclaimed_bytes)} reclaimed")
        OUT.print(
            f"  {report.found} files added to the index, {report.lost} lost, {report.leftovers} leftovers removed"
        )
        for address in report.ownerless:
            print_note("of a forgotten document", f"{address}; `qcfuse store gc` removes it", "red")
        for address, reason in report.damaged:
            print_note("damaged", f"{address}: {reason}; moved to quarantine", "red")
        for address, reason in report.unread:
            print_note("not read", f"{address}: {reason}; left in place", "red")
        for path in report.strays:
            print_note("not the store's:", f"{path}; left alone")
    if report.damaged or report.unread or report.ownerless:
        raise typer.Exit(1)


@store_app.command()
def gc(folder: Folder, remote: RemoteUrl = None, as_json: Json = False) -> None:
    """Remove expired entries, entries without a source, leftovers of writers, and the quarantine."""
    from qcfuse_rag.library.folder import open_disk_tier, open_store_and_sources
    from qcfuse_rag.store.admin import collect_garbage

    with open_store_and_sources(folder, remote=remote) as (_, documents):
        unwanted = documents.garbage.collect_ownerless()
    with open_disk_tier(folder) as store:
        freed = collect_garbage(store)
    print_result(
        {"unwanted": unwanted, "freed_bytes": freed}, as_json, f"{size(freed)} freed, {unwanted} entries unwanted"
    )


@store_app.command()
def rebuild(folder: Folder, as_json: Json = False) -> None:
    """Rebuild the index from the files, without use counts and pins; a damaged list of documents is set aside."""
    from qcfuse_rag.library.folder import existing_store_folder, open_disk_tier
    from qcfuse_rag.store.admin import rebuild as rebuild_index
    from qcfuse_rag.store.documents.sources import quarantine_manifest

    moved_to = quarantine_manifest(existing_store_folder(folder))
    with open_disk_tier(folder) as store:
        entries = rebuild_index(store)
    text = f"{entries} entries"
    if moved_to is not None:
        text += f"; the damaged list of documents was moved to {moved_to}: warm the documents again"
    print_result({"entries": entries, "manifest_aside": moved_to and str(moved_to)}, as_json, text)


@store_app.command()
def wipe(folder: Folder, yes: Yes = False, as_json: Json = False) -> None:
    """Overwrite every file of a store, or of a library with its passages, with zeros and remove it.

    Files that the store did not write stay, and links are not followed. See docs/guide/store.md for the limits of
    overwriting. A remote behind the store keeps its entries.
    """
    from qcfuse_rag.library.folder import existing_store_folder, text_files, text_folders
    from qcfuse_rag.store.admin import wipe as overwrite

    store_path = existing_store_folder(folder)
    is_library = store_path != folder
    _require_yes(yes, f"this destroys the store in {store_path}")
    report = overwrite(store_path, text_files(folder) if is_library else ())
    for text_folder in text_folders(folder) if is_library else ():
        with suppress(OSError):  # it contains files that do not belong to the library
            text_folder.rmdir()
    if not as_json:
        for path in report.linked:
            print_note("removed, not overwritten:", f"{path} has another name (a hard link)")
        for path in report.left:
            print_note("not the store's:", f"{path}; left alone")
    print_result(asdict(report), as_json, f"{report.files} files overwritten and removed")


@store_app.command()
def clear(folder: Folder, yes: Yes = False, as_json: Json = False) -> None:
    """Remove every entry from the folder, including pinned entries; a remote behind the store keeps its entries."""
    from qcfuse_rag.library.folder import open_disk_tier

    _require_yes(yes, "this removes every entry")
    with open_disk_tier(folder) as store:
        entries = store.clear()
    print_result({"entries": entries}, as_json, f"{entries} entries removed")


@store_app.command()
def sources(folder: Folder, tenant: Tenant = None, remote: RemoteUrl = None, as_json: Json = False) -> None:
    """List the documents of a store, with the number of chunks and of missing chunks."""
    from qcfuse_rag.library.folder import open_store_and_sources

    with open_store_and_sources(folder, tenant=tenant, remote=remote) as (_, documents):
        missing = documents.missing()
        counts = {name: len(documents.addresses(name)) for name in documents.names()}
    chunk_counts = {name: {"chunks": count, "missing": missing.get(name, 0)} for name, count in counts.items()}
    lines = (
        f"{name}: {count} chunks" + (f", {missing[name]} not stored" if name in missing else "")
        for name, count in counts.items()
    )
    print_result({"sources": chunk_counts}, as_json, *lines)


@store_app.command()
def lookup(
    folder: Folder, source: Document, tenant: Tenant = None, remote: RemoteUrl = None, as_json: Json = False
) -> None:
    """Show the tier of each chunk of a document."""
    from qcfuse_rag.library.folder import open_store_and_sources
    from qcfuse_rag.store.admin import lookup as find_tiers

    with open_store_and_sources(folder, tenant=tenant, remote=remote) as (store, documents):
        tiers = find_tiers(store, _select(documents, None, source))
    lines = (f"{address}  {tier or 'not stored'}" for address, tier in tiers.items())
    print_result({"source": source, "chunks": tiers}, as_json, *lines)


@store_app.command()
def forget(
    folder: Folder, source: Document, tenant: Tenant = None, remote: RemoteUrl = None, as_json: Json = False
) -> None:
    """Remove a document: its passages from the library, and its chunks from every tier unless shared."""
    from qcfuse_rag.library.folder import existing_store_folder, index_folder, library_of, open_store_and_sources
    from qcfuse_rag.library.index import forget_passages
    from qcfuse_rag.library.jobs import forget_source, job_lock

    folder = library_of(folder)
    # A running warming job would save the passages again that it loaded at its start.
    lock = job_lock(folder) if existing_store_folder(folder) != folder else nullcontext()
    with lock, open_store_and_sources(folder, tenant=tenant, remote=remote) as (store, documents):
        passages = forget_passages(index_folder(folder, store), source)
        if not passages:
            _require_document(documents, source)
        removed, waiting = documents.forget(source), documents.garbage.count()
        forget_source(folder, source)
    print_result(
        {"source": source, "removed": removed, "passages": passages, "waiting": waiting},
        as_json,
        f"{removed} chunks and {passages} passages removed"
        + (f"; {waiting} are in a remote that cannot be reached: `qcfuse store gc` removes them later" * (waiting > 0)),
    )


@store_app.command()
def pin(
    folder: Folder,
    addresses: Addresses = None,
    source: SourceName = None,
    off: Annotated[bool, typer.Option("--off", help="Remove the protection.")] = False,
    tenant: Tenant = None,
    remote: RemoteUrl = None,
    as_json: Json = False,
) -> None:
    """Protect entries from eviction."""
    from qcfuse_rag.library.folder import open_store_and_sources

    with open_store_and_sources(folder, tenant=tenant, remote=remote) as (store, documents):
        selected = _select(documents, addresses, source)
        count = sum(store.pin(address, pinned=not off) for address in selected)
    if not count:
        raise QCFuseError(f"none of the {len(selected)} entries is in the store")
    print_result({"entries": count, "pinned": not off}, as_json, f"{count} entries {'no longer ' if off else ''}pinned")


@store_app.command()
def compress(
    folder: Folder,
    addresses: Addresses = None,
    source: SourceName = None,
    as_json: Json = False,
) -> None:
    """Rewrite entries in int8; all entries if none are named."""
    from qcfuse_rag.library.folder import open_disk_tier
    from qcfuse_rag.store.admin import compress as compress_entries
    from qcfuse_rag.store.documents.sources import Sources

    with open_disk_tier(folder) as store, progress_bar("compressing", "entries") as advance:
        with closing(Sources(store)) as documents:
            selected = _select(documents, addresses, source) if addresses or source else None
        report = compress_entries(store, selected, progress=advance)
    print_result(
        asdict(report),
        as_json,
        f"{report.done} entries, {size(report.bytes_before)} before, {size(report.bytes_after)} after",
    )
    _require_all(report)


@store_app.command()
def move(
    folder: Folder,
    addresses: Addresses = None,
    source: SourceName = None,
    to: Annotated[
        str | None, typer.Option(help="URL of the remote to move to, such as s3://bucket/kv or redis://host.")
    ] = None,
    back: Annotated[str | None, typer.Option("--from", help="URL of the remote to move from.")] = None,
    keep: Annotated[bool, typer.Option(help="Copy instead of moving.")] = False,
    as_json: Json = False,
) -> None:
    """Move entries to a remote store or back; all entries if none are named."""
    from qcfuse_rag.library.folder import open_disk_tier
    from qcfuse_rag.store.admin import move as move_entries
    from qcfuse_rag.store.backends.remote import open_remote
    from qcfuse_rag.store.documents.sources import Sources

    if (to is None) == (back is None):
        raise QCFuseError("name the remote with --to or with --from")
    with open_disk_tier(folder) as store, open_remote(to or back or "", cipher=store.cipher) as remote:
        with closing(Sources(store)) as documents:
            selected = _select(documents, addresses, source) if addresses or source else None
        origin, target = (store, remote) if to is not None else (remote, store)
        with progress_bar("moving", "entries") as advance:
            report = move_entries(origin, target, selected, keep=keep, progress=advance)
    print_result(asdict(report), as_json, f"{report.done} entries {'copied' if keep else 'moved'}")
    _require_all(report)


def _require_all(report: ChangeReport) -> None:
    if report.missing:
        raise QCFuseError(f"{len(report.missing)} entries are left as they were: {', '.join(list(report.missing)[:5])}")


def _require_document(documents: Sources, source: str) -> None:
    if source not in documents.names():
        raise QCFuseError(f"there is no document {source!r} in the store; `qcfuse store sources` lists them")


def _select(documents: Sources, addresses: list[str] | None, source: str | None) -> list[str]:
    selected = list(addresses or ())
    if source is not None:
        _require_document(documents, source)
        selected += sorted(documents.addresses(source))
    if not selected:
        raise QCFuseError("name entries by address, or a document with --source")
    return selected


def _require_yes(yes: bool, consequence: str) -> None:
    if not yes:
        raise QCFuseError(f"{consequence}; say --yes if you mean it")
