"""Shared by commands over a library: its settings in place of options, its engine, and notes on both.

This module imports the model code, which is slow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from qcfuse_rag.cli.console import print_note, status
from qcfuse_rag.cli.options import AskOptions
from qcfuse_rag.engine.config import EngineConfig
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.library.folder import existing_store_folder, index_folder, open_library_store, refuse_store
from qcfuse_rag.library.retriever import Retriever
from qcfuse_rag.library.session import LibrarySession
from qcfuse_rag.library.settings import LibrarySettings, embedder_name
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.entry.codec import entry_bytes
from qcfuse_rag.store.quantization import STORE_FORMATS
from qcfuse_rag.verification.verdict import verdict_problem


def passage_bytes(lm: LanguageModel, lengths: Collection[int], caches: int) -> dict[str, int]:
    """Return the bytes that passages of so many tokens take in each format of a store, with several caches of each."""
    return {
        kv_dtype: caches * sum(entry_bytes(lm.shapes, lm.dtype, kv_dtype, tokens) for tokens in lengths)
        for kv_dtype in STORE_FORMATS
    }


def with_settings(config: EngineConfig, settings: LibrarySettings) -> EngineConfig:
    """Return a command's config with the library's settings in place of options that were not given."""
    changes = settings.model_settings(model=config.model, dtype=config.dtype)
    if not changes:
        return config
    if config.method is None:
        changes |= {"method": settings.method, "base": config.base or settings.base}
    return replace(config, template=settings.template, **changes)


def open_engine(
    store: KVStore,
    config: EngineConfig,
    settings: LibrarySettings | None = None,
    *,
    method: Method | None = None,
    lm: LanguageModel | None = None,
) -> FusionEngine:
    """Load an engine over an open store, which the caller closes; print notes on the bundled and on a changed model.

    `lm` is a model that is loaded already.
    """
    config = replace(config, weights=config.weights or "model", verdict="ignore", compiled=False)
    if lm is None:
        print_model_note(config)
    with status("loading the model") if lm is None else nullcontext():
        engine = FusionEngine.load(config, store=store, method=method, lm=lm)
    change = None if settings is None else settings.change_of_model(engine.lm.fingerprint)
    if change is not None:
        print_note("note:", change)
    return engine


@contextmanager
def open_session(
    library: Path, config: EngineConfig, options: AskOptions, *, lm: LanguageModel | None = None
) -> Iterator[LibrarySession]:
    """Open a library for questions, with its own model, method and wording where the options name none."""
    refuse_store(library)
    settings = LibrarySettings.load(library)
    config = with_settings(config, settings)
    settings.require_caches(config.chosen_method())
    existing_store_folder(library)  # do not create a library under a misspelt name
    with open_library_store(library, tenant=options.tenant) as store:
        retriever = Retriever.open(index_folder(library, store), embedder_name(options.embedder))
        engine = open_engine(store, config, settings, lm=lm)
        print_verdict_note(engine)
        yield LibrarySession(engine, retriever, options.top_k, options.fidelity)


def print_model_note(config: EngineConfig) -> None:
    """Print a note on standard error if no model is named."""
    if config.model is None:
        print_note("note:", "the bundled model is for the demonstration; `qcfuse models list` names others")


def print_verdict_note(engine: FusionEngine) -> None:
    """Print a note on standard error if the engine's method has not been verified on its model."""
    problem = verdict_problem(engine.verdict, engine.method)
    if engine.store.folder is not None and problem is not None:
        print_note("note:", problem)
