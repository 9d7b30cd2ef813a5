"""Load an engine over a library's store and print notes on it; this module imports the model code, which is slow."""

from __future__ import annotations

from qcfuse_rag.bundled import default_model
from qcfuse_rag.cli.console import print_note, status
from qcfuse_rag.cli.library.settings import LibrarySettings
from qcfuse_rag.cli.options import WordingOptions
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.verification.verdict import verdict_problem


def open_engine(
    store: KVStore, method: Method, options: WordingOptions, settings: LibrarySettings | None = None
) -> FusionEngine:
    """Load an engine over an open store, which the caller closes; SmolLM2-135M if no model is given.

    A method that leaves its ratio to `qcfuse verify` takes the ratio of the verdict beside the store. A library's
    settings give the wording of prompts; a note is printed if its model has changed.
    """
    with status("loading the model"):
        engine = FusionEngine.load(
            options.model or default_model(),
            store=store,
            template=options.worded(None if settings is None else settings.template),
            method=method,
            device=options.device,
            dtype=options.dtype,
            weights=options.weight_format,
            verdict="ignore",
            compiled=False,
        )
    change = None if settings is None else settings.change_of_model(engine.lm.fingerprint)
    if change is not None:
        print_note("note:", change)
    print_profile_note(engine)
    return engine


def print_verdict_note(engine: FusionEngine) -> None:
    """Print a note on standard error if the engine's method has not been verified on its model."""
    problem = verdict_problem(engine.verdict, engine.method)
    if engine.store.folder is not None and problem is not None:
        print_note("note:", problem)


def print_profile_note(engine: FusionEngine) -> None:
    """Print a note on standard error if there is a layer profile beside the store that the engine cannot use."""
    if engine.profile_ignored is not None:
        print_note("note:", engine.profile_ignored)
