"""The engine over a library's store, and what is to be said of it; importing this takes as long as its model code."""

from __future__ import annotations

from rich.markup import escape

from qcfuse_rag.bundled import default_model
from qcfuse_rag.cli.console import ERR, status
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.engine.verdict import find_verdict, objection
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.store.backends.base import KVStore


def open_engine(
    store: KVStore, model: str | None, method: Method, device: str | None, dtype: str | None
) -> FusionEngine:
    """Load a model, SmolLM2-135M if none is named, onto an open store."""
    with status("loading the model"):
        engine = FusionEngine.load(
            model or default_model(), store=store, method=method, device=device, dtype=dtype, verdict="ignore"
        )
    note_profile(engine)
    return engine


def note_verdict(engine: FusionEngine) -> None:
    """Say on standard error if the engine's method has not been verified on its model."""
    reason = objection(find_verdict(engine.lm, engine.store, engine.method), engine.method)
    if engine.store.folder is not None and reason is not None:
        ERR.print(f"[yellow]note:[/yellow] {escape(reason)}", highlight=False, soft_wrap=True)


def note_profile(engine: FusionEngine) -> None:
    """Say on standard error why the profile beside the store is not used, if there is one that is not."""
    if engine.profile_ignored is not None:
        ERR.print(f"[yellow]note:[/yellow] {escape(engine.profile_ignored)}", highlight=False, soft_wrap=True)
