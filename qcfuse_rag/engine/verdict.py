"""The outcome of `qcfuse verify`, kept beside a store for the model and method it was reached on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qcfuse_rag.errors import QCFuseError, Unverified, UnverifiedMethod
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.probes import QuestionProbe
from qcfuse_rag.generation.caller_warnings import warn_caller
from qcfuse_rag.models.fingerprint import digest
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.atomic_write import write_whole
from qcfuse_rag.store.backends.base import KVStore

FOLDER = "verdicts"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: such as `exactness` or `kl`.
        value: what was measured.
        limit: what it is held against.
        at_least: the value has to reach the limit; else it must not exceed it.
        detail: how it was measured, in words.
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
    """What was found out about a method on a model.

    Attributes:
        fingerprint: digest of the model.
        method: digest of the method with all its parts, see `method_digest`.
        label: the method in words.
        date: ISO 8601, UTC.
        checks: all that was looked at.
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
        """Write it to a store's folder, in the place of an earlier one; return the file.

        Raises:
            QCFuseError: if it cannot be written.
        """
        path = verdict_path(folder, self.fingerprint, self.method)
        try:
            write_whole(path, json.dumps(self.to_dict(), indent=1))
        except OSError as error:
            raise QCFuseError(f"cannot write the verdict {path}: {error}") from error
        return path


def method_digest(lm: LanguageModel, store: KVStore, method: Method) -> str:
    """Return what stands for all that a method does: its parts, the layers it goes by, how numbers are stored.

    Parts are frozen data, so their words say all but which layers are critical; of those a new profile tells others.
    """
    probe = method.probe
    unread = probe is None or (isinstance(probe, QuestionProbe) and probe.layers != "critical")
    layers = () if unread else lm.critical_layers
    return digest(f"{method!r} {layers} {store.numbers}".encode())


def verdict_path(folder: Path, fingerprint: str, method: str) -> Path:
    """Return where the verdict on a model and a method is kept in a store's folder."""
    return folder / FOLDER / f"{fingerprint}-{method}.json"


def find_verdict(lm: LanguageModel, store: KVStore, method: Method) -> Verdict | None:
    """Read the verdict on a model, a store and a method; None if there is none that can be read."""
    if store.folder is None:
        return None
    path = verdict_path(store.folder, lm.fingerprint.digest, method_digest(lm, store, method))
    try:
        data = json.loads(path.read_text("utf-8"))
        if data.pop("version") != VERSION:
            return None
        checks = tuple(Check(**{k: v for k, v in one.items() if k != "passed"}) for one in data.pop("checks"))
        data.pop("passed")
        return Verdict(**data, checks=checks)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def look_up(lm: LanguageModel, store: KVStore, method: Method, *, require: bool) -> Verdict | None:
    """Return the verdict on a model, a store and a method; without one that passed, warn or refuse.

    Full prefill needs none.

    Raises:
        Unverified: if one is required.
    """
    found = find_verdict(lm, store, method)
    reason = objection(found, method)
    if reason is not None and require:
        raise Unverified(reason)
    if reason is not None:
        warn_caller(reason, UnverifiedMethod)
    return found


def objection(found: Verdict | None, method: Method) -> str | None:
    """Return why a method is not to be relied on, given the verdict on it; None if it passed or is full prefill."""
    if method.base is None or (found is not None and found.passed):
        return None
    if found is None:
        state = "has not been verified on this model"
    else:
        failed = ", ".join(check.name for check in found.checks if not check.passed)
        state = f"was verified on this model and did not pass: {failed}"
    return f"{method.name} {state}; run `qcfuse verify`, or use method `full`"
