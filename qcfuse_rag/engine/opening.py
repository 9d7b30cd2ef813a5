"""Open what an engine consists of: a model that was checked, a store, and a method with its verdict."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from qcfuse_rag.engine.caller_warnings import warn_caller
from qcfuse_rag.engine.config import VerdictPolicy
from qcfuse_rag.errors import Unverified, UnverifiedMethod
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.factory import open_store
from qcfuse_rag.verification.exactness import check_exact_once
from qcfuse_rag.verification.verdict import Verdict, find_verdict, verdict_problem


class OpenedParts(NamedTuple):
    """The parts of an engine.

    Attributes:
        lm: the model.
        store: the open store.
        method: the method, with the ratio of a passing verdict if it leaves the choice to it.
        verdict: the verdict that was found, or None.
    """

    lm: LanguageModel
    store: KVStore
    method: Method
    verdict: Verdict | None


def open_parts(
    lm: LanguageModel,
    store: str | Path | KVStore | None,
    method: Method,
    *,
    check: bool,
    policy: VerdictPolicy,
) -> OpenedParts:
    """Check a model, open its store, and find its verdict there; see `FusionEngine.load`.

    A store that is opened here is closed if the method is not verified.

    Raises:
        UnsupportedModel: if the check fails.
        StoreError: if the store cannot be opened.
        Unverified: if a verdict is required and there is none that passed.
    """
    if check:
        check_exact_once(lm)
    opened = store if isinstance(store, KVStore) else open_store(store)
    try:
        verdict = require_verdict(lm, opened, method, policy)
    except Unverified:
        if not isinstance(store, KVStore):
            opened.close()
        raise
    return OpenedParts(lm, opened, method if verdict is None else verdict.applied(method), verdict)


def require_verdict(lm: LanguageModel, store: KVStore, method: Method, policy: VerdictPolicy) -> Verdict | None:
    """Return the verdict on a model, a store and a method; warn or raise if the method did not pass.

    Full prefill needs no verdict. A store without a folder cannot keep a verdict, so there is no warning.

    Args:
        lm: the model.
        store: the verdict is read from its folder.
        method: the method.
        policy: without a passing verdict, warn, raise an error, or do nothing.

    Raises:
        Unverified: if a passing verdict is required and absent.
    """
    verdict = find_verdict(lm, store, method)
    problem = verdict_problem(verdict, method)
    if problem is not None and policy == "require":
        raise Unverified(problem)
    if problem is not None and policy == "warn" and store.folder is not None:
        warn_caller(problem, UnverifiedMethod)
    return verdict
