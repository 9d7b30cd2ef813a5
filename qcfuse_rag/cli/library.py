"""What commands over a library share: its settings in place of options, its engine, and notes on both.

This module imports the model code, which is slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from qcfuse_rag.bundled import default_model
from qcfuse_rag.cli.console import print_note, status
from qcfuse_rag.cli.options import AskOptions, CorpusOptions, MethodOptions, ModelOptions, WeightsChoice, WordingOptions
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.library.folder import index_folder, open_library_store, refuse_store
from qcfuse_rag.library.index import PassageIndex
from qcfuse_rag.library.retriever import Retriever
from qcfuse_rag.library.session import LibrarySession
from qcfuse_rag.library.settings import LibrarySettings, model_name
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.verification.verdict import verdict_problem

OptionsT = TypeVar("OptionsT", bound=ModelOptions)


def with_settings(options: OptionsT, settings: LibrarySettings) -> OptionsT:
    """Return a command's options with the library's settings in place of options that were not given.

    Raises:
        QCFuseError: if the command names another model, dtype or format of weights than the library has.
    """
    weights = None if options.weights in (None, WeightsChoice.AUTO) else options.weights
    changes = settings.model_settings(model=options.model, dtype=options.dtype, weights=weights)
    if not changes:
        return options
    changes["weights"] = WeightsChoice(changes["weights"])
    if isinstance(options, CorpusOptions):
        changes["base"] = options.base or settings.base
    elif isinstance(options, MethodOptions) and options.method is None:
        changes |= {"method": settings.method, "base": options.base or settings.base}
    return replace(options, **changes)


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
    return engine


@contextmanager
def open_session(library: Path, options: AskOptions) -> Iterator[LibrarySession]:
    """Open a library for questions, with its own model, method and wording where the options name none.

    Raises:
        QCFuseError: if there is no library, or it has another model, embedder or base than the options name.
    """
    refuse_store(library)
    settings = LibrarySettings.load(library)
    options = with_settings(options, settings)
    method = options.chosen_method()
    settings.require_caches(method)
    embedder = None if options.embedder is None else model_name(options.embedder)
    if not library.is_dir():
        PassageIndex.load(index_folder(library), embedder)  # raises; opening the store would create the folder
    with open_library_store(library, tenant=options.tenant) as store:
        retriever = Retriever(index_folder(library, store), embedder)
        engine = open_engine(store, method, options, settings)
        print_verdict_note(engine)
        yield LibrarySession(engine, retriever, options.top_k, options.fidelity.value)


def print_verdict_note(engine: FusionEngine) -> None:
    """Print a note on standard error if the engine's method has not been verified on its model."""
    problem = verdict_problem(engine.verdict, engine.method)
    if engine.store.folder is not None and problem is not None:
        print_note("note:", problem)
