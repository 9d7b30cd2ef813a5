"""`qcfuse verify`: may this method be relied on for this model?"""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from qcfuse_rag.cli.console import OUT, print_json, progress_bar
from qcfuse_rag.cli.library import disk_folder, index_folder, open_kv
from qcfuse_rag.cli.open_engine import open_engine
from qcfuse_rag.engine.verdict import Verdict
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.retrieval.index import PASSAGES, read_passages
from qcfuse_rag.store.backends.memory import MemoryStore
from qcfuse_rag.verification.checks import Limits, verify


def run_verify(
    model: str | None,
    store: Path | None,
    method: Method,
    size: int,
    tokens: int,
    limits: Limits,
    device: str | None,
    dtype: str | None,
    tenant: str | None,
    *,
    as_json: bool,
) -> bool:
    """Verify a method, on a library's own passages if there is one, and keep the verdict beside its store.

    Returns:
        Whether every check passed.

    Raises:
        QCFuseError: if there is no store in the folder.
    """
    if store is not None:
        disk_folder(store)  # a name that is misspelt is not a new library
    with MemoryStore() if store is None else open_kv(store, tenant=tenant) as kept:
        place = None if store is None else index_folder(store, kept)
        texts = [one.text for one in read_passages(place)] if place is not None and (place / PASSAGES).exists() else []
        engine = open_engine(kept, model, method, device, dtype)
        with progress_bar("verifying", "prompts") as advance:
            verdict = verify(
                engine, engine.method, texts=texts, size=size, tokens=tokens, limits=limits, progress=advance
            )
        saved = None if kept.folder is None else verdict.save(kept.folder)
    if as_json:
        print_json({**verdict.to_dict(), "own_passages": len(texts), "saved": saved and str(saved)})
    else:
        _print(verdict, saved)
    return verdict.passed


def _print(verdict: Verdict, saved: Path | None) -> None:
    table = Table(title=f"{verdict.label}: {'passed' if verdict.passed else 'did not pass'}", title_justify="left")
    for column in ("check", "measured", "limit", "", "how"):
        table.add_column(column)
    for check in verdict.checks:
        bound = f"{'at least' if check.at_least else 'at most'} {check.limit:.3g}"
        state = "[green]passed[/green]" if check.passed else "[red]failed[/red]"
        table.add_row(check.name, f"{check.value:.3g}", bound, state, check.detail)
    OUT.print(table)
    if saved is not None:
        OUT.print(f"kept in {saved}", highlight=False, markup=False, soft_wrap=True)
