"""The result of `qcfuse verify` for a model and a method, saved in the store's folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qcfuse_rag import bundled
from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.fusion.method import FixedRatio, Method, VerifiedRatio
from qcfuse_rag.fusion.probes import ReadsFolder
from qcfuse_rag.models.fingerprint import digest
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.residuals import ResidualKernel
from qcfuse_rag.store.backends.base import KVStore

FOLDER = "verdicts"
PACKAGED = Path(bundled.__file__).parent
"""Has the verdicts that come with the package, as a store's folder has its own."""
VERSION = 4
EXACTNESS = "exactness"
"""Name of the check of the engine itself, which is the same at every ratio."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a verification, such as `exactness` or `kl`."""

    name: str
    value: float
    limit: float | None  # None if the value is only reported
    at_least: bool  # whether the value must reach the limit; else it must not exceed the limit
    detail: str  # how the value was measured, in words

    @property
    def passed(self) -> bool:
        """Whether the value is within the limit."""
        if self.limit is None:
            return True
        value = round(self.value, 9)  # 0.55 - 0.45 is at most 0.1
        return value >= self.limit if self.at_least else value <= self.limit


@dataclass(frozen=True, slots=True)
class Trial:
    """The checks of one candidate: a method at one ratio."""

    ratio: float | None  # share of reused tokens recomputed; None if the method's selector decides
    checks: tuple[Check, ...]
    residuals: bool = False  # whether reused tokens moved with recomputed ones

    @property
    def label(self) -> str:
        """The candidate in words, such as `ratio 0.15`."""
        label = "its own ratio" if self.ratio is None else f"ratio {self.ratio:g}"
        return f"{label} with residuals" if self.residuals else label

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    @property
    def failed(self) -> str:
        """The names of the failed checks, with commas."""
        return ", ".join(check.name for check in self.checks if not check.passed)

    @property
    def divergence(self) -> float:
        """The value of the check `kl`."""
        return next((check.value for check in self.checks if check.name == "kl"), 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            **{name: getattr(self, name) for name in ("label", "ratio", "passed")},
            "checks": [{**asdict(check), "passed": check.passed} for check in self.checks],
            "residuals": self.residuals,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trial:
        """Read what `to_dict` returned."""
        checks = tuple(Check(**{k: v for k, v in check.items() if k != "passed"}) for check in data["checks"])
        return cls(data["ratio"], checks, bool(data["residuals"]))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of verifying a method on a model: the candidates that were tried, and the first that passed."""

    fingerprint: str  # digest of the model
    method: str  # digest of the method with all its parts, see `method_digest`
    label: str  # the method in words, without a ratio
    date: str  # ISO 8601, UTC
    tried: tuple[Trial, ...]  # at least one candidate, the cheapest first

    @property
    def recommended(self) -> Trial | None:
        """The first candidate that passed; None if none did."""
        return next((trial for trial in self.tried if trial.passed), None)

    @property
    def ratio(self) -> float | None:
        """The recommended ratio; None if no candidate passed, or the method has no ratio."""
        return None if self.recommended is None else self.recommended.ratio

    @property
    def passed(self) -> bool:
        """Whether a candidate passed."""
        return self.recommended is not None

    @property
    def recommendation(self) -> str:
        """The verdict in one sentence."""
        if self.recommended is not None:
            ratios = {trial.ratio for trial in self.tried}
            smallest = " (the smallest of those tried that passes)" if len(ratios) > 1 else ""
            return f"{self.label} passes at {self.recommended.label}{smallest}"
        first, last = self.tried[0], self.tried[-1]
        if first.ratio != last.ratio:
            failure = f"{self.label} passes at none of the ratios tried; at {last.label} it fails: {last.failed}"
        else:
            failure = f"{self.label} does not pass at {first.label}: {first.failed}"
        return f"{failure}; {self.next_step}"

    @property
    def next_step(self) -> str:
        """Advice to the user when the method, or its ratio, did not pass."""
        if self.ratio is not None:
            return f"use ratio {self.ratio:g}, which passed, or method `full`"
        highest = self.tried[-1].ratio
        if highest is None or not 0 < highest < 1:
            return "use method `full`"
        return f"verify a ratio above {highest:g} (`qcfuse verify --ratio`), or use method `full`"

    def covers(self, method: Method) -> bool:
        """Return whether the method, as `applied` returns it, was tried and passed."""
        runs = self.applied(method)
        settings = (runs.ratio, runs.residuals is not None)
        return any(trial.passed and (trial.ratio, trial.residuals) == settings for trial in self.tried)

    def applied(self, method: Method) -> Method:
        """Return the method as recommended: at the ratio if it leaves that to the verdict, with residuals.

        A method at another ratio stays as it is: what passed holds for its ratio alone.
        """
        trial = self.recommended
        if trial is None or trial.ratio is None:
            return method
        if isinstance(method.budget, VerifiedRatio):
            method = replace(method, budget=FixedRatio(trial.ratio))
        if method.ratio != trial.ratio:
            return method
        residuals = method.residuals or (ResidualKernel() if trial.residuals else None)
        return replace(method, residuals=residuals)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "version": VERSION,
            **{name: getattr(self, name) for name in ("fingerprint", "method", "label", "date")},
            **{name: getattr(self, name) for name in ("passed", "ratio", "recommendation")},
            "tried": [trial.to_dict() for trial in self.tried],
        }

    def save(self, folder: str | Path) -> Path:
        """Write the verdict to a store's folder, replace an earlier one, and return the file."""
        path = _path(Path(folder), self.fingerprint, self.method)
        try:
            write_atomically(path, json.dumps(self.to_dict(), indent=1))
        except OSError as error:
            raise QCFuseError(f"cannot write the verdict {path}: {error}") from error
        return path


def method_digest(lm: LanguageModel, store: KVStore, method: Method) -> str:
    """Return a digest of all that a verdict depends on: the method's parts, a probe's file in the folder, quantization.

    A method's parts are frozen dataclasses, so their `repr` contains everything else. The quantization is the store's.
    The guard does not count, since `verify` ignores it, nor does the ratio of a `VerifiedRatio`, since the verdict
    chooses it.
    """
    if isinstance(method.budget, VerifiedRatio):
        method = replace(method, budget=VerifiedRatio(0.0))
    found = method.probe.found(lm, store.folder) if isinstance(method.probe, ReadsFolder) else ()
    return digest(f"{method.unguarded!r} {found} {store.kv_dtype}".encode())


def _path(folder: Path, fingerprint: str, method: str) -> Path:
    return folder / FOLDER / f"{fingerprint}-{method}.json"


def find_verdict(lm: LanguageModel, store: KVStore, method: Method) -> Verdict | None:
    """Read the verdict on a model, a store and a method; None if it is absent or unreadable.

    A fixed ratio without a verdict of its own has the verdict that chose a ratio for the same method. A store's own
    verdicts come before those of the package.
    """
    methods = [method] if fixed_ratio(method) is None else [method, replace(method, budget=VerifiedRatio(0.0))]
    folders = [PACKAGED] if store.folder is None else [store.folder, PACKAGED]
    found = (_read(lm, folder, method_digest(lm, store, asked)) for folder in folders for asked in methods)
    return next((verdict for verdict in found if verdict is not None), None)


def _read(lm: LanguageModel, folder: Path, method: str) -> Verdict | None:
    path = _path(folder, lm.fingerprint.digest, method)
    try:
        data = json.loads(path.read_text())
        if data["version"] != VERSION:
            return None
        # Earlier versions also tried methods with a correction (`calibration`) that is no longer there.
        tried = tuple(Trial.from_dict(trial) for trial in data["tried"] if trial.get("calibration") is None)
        if lm.device.type != "cpu":  # a GPU runs a method without residuals
            tried = tuple(trial for trial in tried if not trial.residuals)
        return Verdict(data["fingerprint"], data["method"], data["label"], data["date"], tried) if tried else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def verdict_problem(verdict: Verdict | None, method: Method) -> str | None:
    """Return why a method is not verified and what to do; None if its verdict passed or it is full prefill."""
    if method.base is None or (verdict is not None and verdict.covers(method)):
        return None
    if verdict is None:
        return f"{method.name} has not been verified on this model; `qcfuse verify --quick --store FOLDER` does that"
    fixed = fixed_ratio(method)
    trials = [trial for trial in verdict.tried if fixed is None or trial.ratio == fixed]
    if not trials:
        return f"{method.name} has not been verified on this model at ratio {fixed:g}; {verdict.next_step}"
    return (
        f"{method.name} was verified on this model and did not pass at {trials[-1].label}: {trials[-1].failed}; "
        f"{verdict.next_step}"
    )


def fixed_ratio(method: Method) -> float | None:
    """Return the ratio that the user fixed; None if the verdict chooses it, or the method has none."""
    return method.budget.ratio if isinstance(method.budget, FixedRatio) else None
