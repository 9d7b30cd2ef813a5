"""`qcfuse verify`: find the ratio at which a method is near full prefill, and keep the verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.table import Table

from qcfuse_rag.cli.console import OUT, print_json, print_line, progress_bar
from qcfuse_rag.cli.library import open_engine, with_settings
from qcfuse_rag.cli.options import VerifyOptions
from qcfuse_rag.engine.config import EngineConfig
from qcfuse_rag.library.folder import existing_store_folder, index_folder, open_library_store
from qcfuse_rag.library.index import METADATA, PassageIndex
from qcfuse_rag.library.settings import LibrarySettings
from qcfuse_rag.store.backends.memory import MemoryStore
from qcfuse_rag.verification.sweep import QUICK, VerifySettings, verify
from qcfuse_rag.verification.verdict import EXACTNESS, Check, Trial, Verdict

CHECKED = ("size", "tokens", "kl", "agreement", "loss")
"""The options that are fields of `VerifySettings`."""


def run_verify(config: EngineConfig, options: VerifyOptions, *, as_json: bool) -> bool:
    """Verify a method, save the verdict in the library's store, if given, and return whether a ratio passed.

    The passages are those of the library, or the demonstration's.
    """
    given = {name: getattr(options, name) for name in CHECKED if getattr(options, name) is not None}
    settings = VerifySettings(**((QUICK if options.quick else {}) | given))
    folder, library = options.store, None
    config = replace(config, ratio=options.ratio)
    if folder is not None:
        existing_store_folder(folder)  # do not create a library under a misspelt name
        library = LibrarySettings.load(folder)
        config = with_settings(config, library)
    method = config.chosen_method()
    if library is not None:
        library.require_caches(method)
    texts: list[str] = []
    with MemoryStore() if folder is None else open_library_store(folder, tenant=options.tenant) as store:
        if library is not None and (index_folder(library.folder, store) / METADATA).exists():
            texts = [passage.text for passage in PassageIndex.load(index_folder(library.folder, store)).passages]
        engine = open_engine(store, config, library, method=method)
        with progress_bar("verifying", "prompts") as advance:
            verdict = verify(engine, method, texts=texts, settings=settings, progress=advance)
        saved = None if store.folder is None else verdict.save(store.folder)
    if as_json:
        print_json({**verdict.to_dict(), "own_passages": len(texts), "saved": saved and str(saved)})
    else:
        _print_verdict(verdict, saved)
        print_line(f"hidden answers were in prompts of {options.tokens:,} tokens; if yours are longer, use --tokens")
    return verdict.passed


def _print_verdict(verdict: Verdict, saved: Path | None) -> None:
    shown = verdict.recommended or verdict.tried[-1]
    table = Table("", *map(_heading, _columns(shown)), "", title=verdict.label, title_justify="left")
    for trial in verdict.tried:
        state = "[green]passed[/green]" if trial.passed else "[red]failed[/red]"
        cells = [f"{c.value:.3g}" if c.passed else f"[red]{c.value:.3g}[/red]" for c in _columns(trial)]
        table.add_row(trial.label, *cells, state)
    OUT.print(table)
    for check in shown.checks:
        print_line(f"{check.name} {check.value:.3g}: {check.detail}")
    print_line(verdict.recommendation)
    if saved is not None:
        print_line(f"saved in {saved}")


def _columns(trial: Trial) -> list[Check]:
    return [check for check in trial.checks if check.name != EXACTNESS]


def _heading(check: Check) -> str:
    return check.name if check.limit is None else f"{check.name}\n{'≥' if check.at_least else '≤'} {check.limit:.3g}"
