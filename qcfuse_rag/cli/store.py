"""`qcfuse store ...`: look after a store."""

from __future__ import annotations

from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from qcfuse_rag.cli.console import ERR, OUT, print_json, progress_bar, size
from qcfuse_rag.errors import QCFuseError

store_app = typer.Typer(help="Look after a store.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="Folder of a library, or of a store.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it; nothing asks again.")]
SourceName = Annotated[str | None, typer.Option("--source", help="All entries of this document.")]
Tenant = Annotated[str | None, typer.Option(help="Whose entries; the secret is in QCFUSE_SECRET.")]
Remote = Annotated[
    str | None, typer.Option(help="URL of the remote behind it, if that takes a password; else it is known.")
]
Document = Annotated[str, typer.Argument(help="A document.")]
Addresses = Annotated[list[str] | None, typer.Argument(help="Addresses of entries, as `lookup` shows them.")]


@store_app.command()
def stats(folder: Folder, as_json: Json = False) -> None:
    """Show what a store holds and how it is set up."""
    from dataclasses import asdict

    from qcfuse_rag.cli.library import open_disk

    with open_disk(folder) as store:
        found, models, settings = store.stats()[0], store.models(), asdict(store.settings)
    settings["encrypted"] = settings.pop("secret") is not None
    if as_json:
        print_json({**found.to_dict(), "settings": settings, "models": list(models.values())})
        return
    OUT.print(
        f"{found.entries} chunks, {size(found.size_bytes)} of {size(found.limit_bytes or 0)}, in {store.folder}",
        markup=False,
    )
    about = {name: settings[name] for name in ("numbers", "eviction", "ttl_s", "encrypted")}
    OUT.print("  " + ", ".join(f"{name} {value}" for name, value in about.items()))
    for digest, fields in models.items():
        OUT.print(f"  model {digest[:12]}: weights {fields['weights'][:12]}, dtype {fields['dtype']}")


@store_app.command()
def health(folder: Folder, remote: Remote = None, as_json: Json = False) -> None:
    """Try whether a store, and the remote behind it, can be read and written; exits with 1 if not."""
    from dataclasses import replace

    from qcfuse_rag.cli.library import disk_folder, open_disk
    from qcfuse_rag.store.backends.remote import open_remote
    from qcfuse_rag.store.documents.manifest import damage_of

    with open_disk(folder) as store:
        [found], far = store.health(), None
        if (damage := damage_of(disk_folder(folder))) is not None:
            found = replace(found, ok=False, problems=(*found.problems, damage))
        notes, remote = list(store.notes), remote or store.settings.remote
        if remote:
            with open_remote(remote, seal=store.seal) as behind:
                [far] = behind.health()
    ok = found.ok and (far is None or far.ok)
    if as_json:
        print_json({**found.to_dict(), "ok": ok, "notes": notes, "remote": None if far is None else far.to_dict()})
    else:
        OUT.print("[green]healthy[/green]" if ok else "[red]not healthy[/red]")
        for line in (*found.problems, *notes, *(() if far is None else far.problems)):
            OUT.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    if not ok:
        raise typer.Exit(1)


@store_app.command()
def fsck(folder: Folder, as_json: Json = False) -> None:
    """Read and check every entry, quarantine damaged ones, and make files and index agree; exits with 1 on damage."""
    from qcfuse_rag.cli.library import open_disk
    from qcfuse_rag.store.maintenance import fsck as check

    with open_disk(folder) as store, progress_bar("checking", "entries") as advance:
        report = check(store, progress=advance)
    if as_json:
        print_json(report.to_dict())
    else:
        OUT.print(f"{report.sound} of {report.checked} entries sound, {size(report.reclaimed_bytes)} reclaimed")
        OUT.print(f"  {report.found} files taken up, {report.lost} lost, {report.leftovers} leftovers removed")
        for address, reason in report.damaged:
            said = f"[red]damaged[/red] {address}: {escape(reason)}, now in quarantine"
            ERR.print(said, highlight=False, soft_wrap=True)
        for address, reason in report.unread:
            said = f"[red]not read[/red] {address}: {escape(reason)}, left where it is"
            ERR.print(said, highlight=False, soft_wrap=True)
    if report.damaged or report.unread:
        raise typer.Exit(1)


@store_app.command()
def gc(folder: Folder, remote: Remote = None, as_json: Json = False) -> None:
    """Remove what has expired, lost its last source, was left by writers, or is in quarantine."""
    from qcfuse_rag.cli.library import open_disk, open_manifest
    from qcfuse_rag.store.maintenance import collect_garbage

    with open_manifest(folder, remote=remote) as (_, manifest):
        unwanted = manifest.collect()
    with open_disk(folder) as store:
        freed = collect_garbage(store)
    _report({"unwanted": unwanted, "freed_bytes": freed}, as_json, f"{size(freed)} freed, {unwanted} entries unwanted")


@store_app.command()
def rebuild(folder: Folder, as_json: Json = False) -> None:
    """Make the index again from the files; counts of uses and pins are lost. A damaged manifest is put aside."""
    from qcfuse_rag.cli.library import disk_folder, open_disk
    from qcfuse_rag.store.documents.manifest import put_aside
    from qcfuse_rag.store.maintenance import rebuild as again

    aside = put_aside(disk_folder(folder))
    with open_disk(folder) as store:
        entries = again(store)
    said = f"; the list of documents was damaged and is now {aside}: warm them again" if aside is not None else ""
    _report({"entries": entries, "manifest_aside": aside and str(aside)}, as_json, f"{entries} entries{said}")


@store_app.command()
def wipe(folder: Folder, yes: Yes = False, as_json: Json = False) -> None:
    """Overwrite every file of a store, or of a library with its passages, with zeros and remove it.

    See docs/store.md for what that cannot promise. A remote behind it keeps what it has.
    """
    from qcfuse_rag.cli.library import disk_folder, text_files, text_folders
    from qcfuse_rag.store.maintenance import wipe as overwrite

    place = disk_folder(folder)
    _insist(yes, f"this destroys the store in {place}")
    files = overwrite(place, text_files(folder) if place != folder else ())
    for emptied in text_folders(folder) if place != folder else ():
        with suppress(OSError):  # somebody else's files are in it
            emptied.rmdir()
    _report({"files": files}, as_json, f"{files} files overwritten and removed")


@store_app.command()
def clear(folder: Folder, yes: Yes = False, as_json: Json = False) -> None:
    """Remove every entry from the folder, pinned ones too; a remote behind it keeps what it has."""
    from qcfuse_rag.cli.library import open_disk

    _insist(yes, "this removes every entry")
    with open_disk(folder) as store:
        entries = store.clear()
    _report({"entries": entries}, as_json, f"{entries} entries removed")


@store_app.command()
def sources(folder: Folder, tenant: Tenant = None, remote: Remote = None, as_json: Json = False) -> None:
    """List the documents whose passages the store has, and how many of them are missing."""
    from qcfuse_rag.cli.library import open_manifest

    with open_manifest(folder, tenant, remote) as (_, manifest):
        missing = manifest.missing()
        counts = {name: len(manifest.addresses(name)) for name in manifest.names()}
    found = {name: {"chunks": count, "missing": missing.get(name, 0)} for name, count in counts.items()}
    if as_json:
        print_json({"sources": found})
        return
    for name, count in counts.items():
        absent = f", {missing[name]} not stored" if name in missing else ""
        OUT.print(f"{name}: {count} chunks{absent}", highlight=False, markup=False, soft_wrap=True)


@store_app.command()
def lookup(
    folder: Folder, source: Document, tenant: Tenant = None, remote: Remote = None, as_json: Json = False
) -> None:
    """Show where the chunks of a document are."""
    from qcfuse_rag.cli.library import open_manifest
    from qcfuse_rag.store.admin import lookup as find

    with open_manifest(folder, tenant, remote) as (store, manifest):
        found = find(store, _chosen(manifest, None, source))
    if as_json:
        print_json({"source": source, "chunks": found})
        return
    for address, tier in found.items():
        OUT.print(f"{address}  {tier or 'not stored'}", highlight=False)


@store_app.command()
def forget(
    folder: Folder, source: Document, tenant: Tenant = None, remote: Remote = None, as_json: Json = False
) -> None:
    """Remove a document: its passages from the library, its chunks from every tier unless others have them too."""
    from qcfuse_rag.cli.job import only_job
    from qcfuse_rag.cli.library import disk_folder, forget_passages, open_manifest

    # A job saves the passages that it began with.
    alone = only_job(folder) if disk_folder(folder) != folder else nullcontext()
    with alone, open_manifest(folder, tenant, remote) as (store, manifest):
        passages = forget_passages(folder, store, source)
        if not passages:
            _check_document(manifest, source)
        removed, waiting = manifest.forget(source), manifest.unwanted
    _report(
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
    off: Annotated[bool, typer.Option("--off", help="Allow eviction again.")] = False,
    tenant: Tenant = None,
    remote: Remote = None,
    as_json: Json = False,
) -> None:
    """Keep entries from being evicted."""
    from qcfuse_rag.cli.library import open_manifest

    with open_manifest(folder, tenant, remote) as (store, manifest):
        chosen = _chosen(manifest, addresses, source)
        count = sum(store.pin(address, pinned=not off) for address in chosen)
    if not count:
        raise QCFuseError(f"none of the {len(chosen)} entries is in the store")
    _report({"entries": count, "pinned": not off}, as_json, f"{count} entries {'no longer ' if off else ''}pinned")


@store_app.command()
def compress(
    folder: Folder,
    addresses: Addresses = None,
    source: SourceName = None,
    numbers: Annotated[str, typer.Option(help="int8 or fp8.")] = "int8",
    as_json: Json = False,
) -> None:
    """Write entries in fewer bytes; all of them if none are named."""
    from qcfuse_rag.cli.library import open_disk
    from qcfuse_rag.store.admin import rewrite
    from qcfuse_rag.store.documents.sources import Sources

    with open_disk(folder) as store, progress_bar("compressing", "entries") as advance:
        with closing(Sources(store)) as manifest:
            chosen = _chosen(manifest, addresses, source) if addresses or source else None
        report = rewrite(store, numbers, chosen, progress=advance)
    _report(
        report.to_dict(),
        as_json,
        f"{report.done} entries, {size(report.bytes_before)} before, {size(report.bytes_after)} after",
    )


@store_app.command()
def move(
    folder: Folder,
    addresses: Addresses = None,
    source: SourceName = None,
    to: Annotated[str | None, typer.Option(help="A remote, such as s3://bucket/kv or redis://host.")] = None,
    back: Annotated[str | None, typer.Option("--from", help="The other way: from this remote.")] = None,
    keep: Annotated[bool, typer.Option(help="Copy instead.")] = False,
    as_json: Json = False,
) -> None:
    """Move entries to a remote store or back; all of them if none are named."""
    from qcfuse_rag.cli.library import open_disk
    from qcfuse_rag.store.admin import move as carry
    from qcfuse_rag.store.backends.remote import open_remote
    from qcfuse_rag.store.documents.sources import Sources

    if (to is None) == (back is None):
        raise QCFuseError("say where to with --to, or where from with --from")
    with open_disk(folder) as store, open_remote(to or back or "", seal=store.seal) as remote:
        with closing(Sources(store)) as manifest:
            chosen = _chosen(manifest, addresses, source) if addresses or source else None
        here, there = (store, remote) if to is not None else (remote, store)
        with progress_bar("moving", "entries") as advance:
            report = carry(here, there, chosen, keep=keep, progress=advance)
    _report(report.to_dict(), as_json, f"{report.done} entries moved, {len(report.missing)} could not be")


def _check_document(manifest: Any, source: str) -> None:
    if source not in manifest.names():
        raise QCFuseError(f"no document {source!r} in the store; `qcfuse store sources` lists them")


def _chosen(manifest: Any, addresses: list[str] | None, source: str | None) -> list[str]:
    chosen = list(addresses or ())
    if source is not None:
        _check_document(manifest, source)
        chosen += sorted(manifest.addresses(source))
    if not chosen:
        raise QCFuseError("name entries by address, or a document with --source")
    return chosen


def _insist(yes: bool, what: str) -> None:
    if not yes:
        raise QCFuseError(f"{what}; say --yes if you mean it")


def _report(data: dict[str, Any], as_json: bool, text: str) -> None:
    if as_json:
        print_json(data)
    else:
        OUT.print(text, highlight=False, markup=False, soft_wrap=True)
