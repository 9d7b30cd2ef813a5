"""`qcfuse verify`: compare a method with full prefill and keep the verdict."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from qcfuse_rag.cli.console import OUT, print_json, print_line, progress_bar
from qcfuse_rag.cli.library import existing_store_folder, index_folder, open_library_store
from qcfuse_rag.cli.open_engine import open_engine
from qcfuse_rag.cli.options import VerifyOptions
from qcfuse_rag.engine.verdict import Verdict
from qcfuse_rag.retrieval.index import PASSAGES, read_passages
from qcfuse_rag.store.backends.memory import MemoryStore
from qcfuse_rag.verification.checks import VerifyLimits, verify


def run_verify(options: VerifyOptions, *, as_json: bool) -> bool:
    """Verify a method, save the verdict in the library's store, if given, and return whether every check passed.

    The passages are those of the library, or the demonstration's.
    """
    method = options.chosen_method()
    limits = VerifyLimits(kl=options.kl, agreement=options.agreement, loss=options.loss)
    if options.store is not None:
        existing_store_folder(options.store)  # do not create a library under a misspelt name
        opened = open_library_store(options.store, tenant=options.tenant)
    else:
        opened = MemoryStore()
    texts: list[str] = []
    with opened as store:
        if options.store is not None and (index_folder(options.store, store) / PASSAGES).exists():
            texts = [passage.text for passage in read_passages(index_folder(options.store, store))]
        engine = open_engine(store, method, options)
        with progress_bar("verifying", "prompts") as advance:
            verdict = verify(
                engine,
                engine.method,
                texts=texts,
                size=options.size,
                tokens=options.tokens,
                limits=limits,
                progress=advance,
            )
        saved = None if store.folder is None else verdict.save(store.folder)
    if as_json:
        print_json({**verdict.to_dict(), "own_passages": len(texts), "saved": saved and str(saved)})
    else:
        _print_verdict(verdict, saved)
    return verdict.passed


def _print_verdict(verdict: Verdict, saved: Path | None) -> None:
    table = Table(title=f"{verdict.label}: {'passed' if verdict.passed else 'did not pass'}", title_justify="left")
    for column in ("check", "measured", "limit", "", "how"):
        table.add_column(column)
    for check in verdict.checks:
        bound = f"{'at least' if check.at_least else 'at most'} {check.limit:.3g}"
        state = "[green]passed[/green]" if check.passed else "[red]failed[/red]"
        table.add_row(check.name, f"{check.value:.3g}", bound, state, check.detail)
    OUT.print(table)
    if saved is not None:
        print_line(f"saved in {saved}")
