"""The result of `qcfuse verify` for a model and a method, saved in the store's folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qcfuse_rag.engine.caller_warnings import warn_caller
from qcfuse_rag.errors import QCFuseError, Unverified, UnverifiedMethod
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.probes import QuestionProbe
from qcfuse_rag.models.fingerprint import digest
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.atomic_write import write_atomically
from qcfuse_rag.store.backends.base import KVStore

FOLDER = "verdicts"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a verification.

    Attributes:
        name: such as `exactness` or `kl`.
        value: the measured value.
        limit: the limit of the value.
        at_least: whether the value must reach the limit; else it must not exceed the limit.
        detail: how the value was measured, in words.
    """

    name: str
    value: float
    limit: float
    at_least: bool
    detail: str

    @property
    def passed(self) -> bool:
        """Whether the value is within the limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of verifying a method on a model.

    Attributes:
        fingerprint: digest of the model.
        method: digest of the method with all its parts, see `method_digest`.
        label: the method in words.
        date: ISO 8601, UTC.
        checks: all checks.
    """

    fingerprint: str
    method: str
    label: str
    date: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        checks = [{**asdict(check), "passed": check.passed} for check in self.checks]
        return {**asdict(self), "version": VERSION, "passed": self.passed, "checks": checks}

    def save(self, folder: Path) -> Path:
        """Write the verdict to a store's folder, replace an earlier one, and return the file.

        Raises:
            QCFuseError: if the file cannot be written.
        """
        path = verdict_path(folder, self.fingerprint, self.method)
        try:
            write_atomically(path, json.dumps(self.to_dict(), indent=1))
        except OSError as error:
            raise QCFuseError(f"cannot write the verdict {path}: {error}") from error
        return path


def method_digest(lm: LanguageModel, store: KVStore, method: Method) -> str:
    """Return a digest of everything that a method's results depend on: parts, critical layers, quantization.

    A method's parts are frozen dataclasses, so their `repr` contains everything but the critical layers; these depend
    on the model's layer profile. The quantization is the store's.
    """
    probe = method.probe
    ignores_profile = probe is None or (isinstance(probe, QuestionProbe) and probe.layers != "critical")
    layers = () if ignores_profile else lm.critical_layers
    return digest(f"{method!r} {layers} {store.numbers}".encode())


def verdict_path(folder: Path, fingerprint: str, method: str) -> Path:
    """Return the path of the verdict on a model and a method in a store's folder."""
    return folder / FOLDER / f"{fingerprint}-{method}.json"


def find_verdict(lm: LanguageModel, store: KVStore, method: Method) -> Verdict | None:
    """Read the verdict on a model, a store and a method; None if it is absent or unreadable."""
    if store.folder is None:
        return None
    path = verdict_path(store.folder, lm.fingerprint.digest, method_digest(lm, store, method))
    try:
        data = json.loads(path.read_text("utf-8"))
        if data.pop("version") != VERSION:
            return None
        checks = tuple(Check(**{k: v for k, v in check.items() if k != "passed"}) for check in data.pop("checks"))
        data.pop("passed")
        return Verdict(**data, checks=checks)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def require_verdict(lm: LanguageModel, store: KVStore, method: Method, *, require: bool) -> Verdict | None:
    """Return the verdict on a model, a store and a method; warn or raise if the method did not pass.

    Full prefill needs no verdict.

    Args:
        lm: the model.
        store: the verdict is read from its folder.
        method: the method.
        require: raise without a passed verdict, instead of a warning.

    Raises:
        Unverified: if a passed verdict is required and absent.
    """
    verdict = find_verdict(lm, store, method)
    reason = verdict_problem(verdict, method)
    if reason is not None and require:
        raise Unverified(reason)
    if reason is not None:
        warn_caller(reason, UnverifiedMethod)
    return verdict


def verdict_problem(verdict: Verdict | None, method: Method) -> str | None:
    """Return why a method is not verified; None if its verdict passed or it is full prefill."""
    if method.base is None or (verdict is not None and verdict.passed):
        return None
    if verdict is None:
        state = "has not been verified on this model"
    else:
        failed = ", ".join(check.name for check in verdict.checks if not check.passed)
        state = f"was verified on this model and did not pass: {failed}"
    return f"{method.name} {state}; run `qcfuse verify`, or use method `full`"
