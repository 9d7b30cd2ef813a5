"""Verify a method on a model: find the smallest ratio at which its answers are near full prefill's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from qcfuse_rag.bundled import paragraphs
from qcfuse_rag.fusion.budgets import FixedRatio, Ratio, VerifiedRatio
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.residuals import ResidualKernel
from qcfuse_rag.verification.checks import (
    Case,
    Engine,
    VerifyLimits,
    answer_checks,
    passage_cases,
    ruler_cases,
)
from qcfuse_rag.verification.exactness import measure_exactness
from qcfuse_rag.verification.references import ReferenceAnswers
from qcfuse_rag.verification.verdict import EXACTNESS, Check, Trial, Verdict, method_digest

RATIOS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75)

Candidate = tuple[str, Method]
"""A label for the user, such as `ratio 0.15`, and the method to try."""


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """What to verify a method on.

    Attributes:
        ratios: to try, where the method leaves its ratio to the verdict; see `candidates`.
        size: prompts of each of the three kinds.
        tokens: length of the RULER-style prompts in tokens.
        limits: of the checks.
    """

    ratios: Sequence[float] = RATIOS
    size: int = 8
    tokens: int = 1024
    limits: VerifyLimits = field(default_factory=VerifyLimits)


def candidates(method: Method, ratios: Sequence[float]) -> list[Candidate]:
    """Return what to try of a method, the cheapest first.

    A method with a `VerifiedRatio` is tried at each ratio, in ascending order. Any other method is tried as it is.
    """
    if isinstance(method.budget, VerifiedRatio):
        methods = [replace(method, budget=FixedRatio(ratio)) for ratio in sorted(set(ratios))]
    else:
        methods = [method]
    return [
        (f"ratio {candidate.ratio:g}" if candidate.ratio is not None else "its own ratio", candidate)
        for candidate in methods
    ]


def verify(
    engine: Engine,
    method: Method,
    *,
    texts: Sequence[str] = (),
    settings: VerifySettings | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Compare a method's answers with full prefill's, from the smallest ratio up to the first that passes.

    A ratio that fails is tried once more with residuals, see `runtime.residuals`. The engine's store is not used, and
    nothing is stored. The method's guard is ignored, so every prompt is fused.

    Args:
        engine: its model, template and number format count; its method does not.
        method: the method.
        texts: the user's passages; by default the demonstration's.
        settings: prompts, ratios and limits.
        progress: called with the number of prompts prefilled so far, and the largest number that may be prefilled.

    Raises:
        QCFuseError: if the hidden texts do not fit the prompts.
        ValueError: if there is no ratio to try, or it is no fraction.
    """
    settings = settings or VerifySettings()
    tried_methods = candidates(method.unguarded, settings.ratios)
    if not tried_methods:
        raise ValueError("name at least one ratio to try")
    groups = _cases(engine, texts, settings)
    moves = _can_move(engine.lm, method)
    done, total = 0, sum(map(len, groups.values())) * (1 + len(tried_methods) * (1 + moves))

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    exact = measure_exactness(engine.lm)
    exactness = Check(EXACTNESS, exact.largest, exact.tolerance, False, "largest logit error, in sd")
    answers = ReferenceAnswers(engine, method.unguarded, advance)
    references = {kind: answers.answer(cases) for kind, cases in groups.items()}
    tried: list[Trial] = []

    def judge(label: str, candidate: Method) -> None:
        comparisons = {kind: answers.compare(group, candidate) for kind, group in references.items()}
        checks = (exactness, *answer_checks(comparisons, settings.limits))
        tried.append(Trial(label, candidate.ratio, checks, candidate.residuals is not None))

    for label, candidate in tried_methods:
        judge(label, candidate)
        if not tried[-1].passed and moves:
            label, candidate = f"{label} with residuals", replace(candidate, residuals=ResidualKernel())
            judge(label, candidate)
        if tried[-1].passed:
            break
    if progress is not None:
        progress(done, done)
    name = f"{method.name} over {method.base.name}" if method.base else method.name
    return Verdict(
        engine.lm.fingerprint.digest,
        method_digest(engine.lm, engine.store, method),
        name,
        datetime.now(UTC).isoformat(timespec="seconds"),
        tuple(tried),
    )


def _can_move(lm: LanguageModel, method: Method) -> bool:
    """Return whether to try a method with residuals, see `runtime.residuals`.

    Only on a CPU: the GPU's kernels and recorded passes move no tokens, and one such request would slow the whole
    batch. A method with a layer hook, without a ratio, with residuals already, or that recomputes no token, is not.
    """
    is_plain = method.base is not None and method.layer_hook is None and method.residuals is None
    return lm.device.type == "cpu" and is_plain and isinstance(method.budget, Ratio) and method.ratio != 0


def _cases(engine: Engine, texts: Sequence[str], settings: VerifySettings) -> dict[str, list[Case]]:
    passages = list(texts) or paragraphs()
    return {
        "needle": ruler_cases(engine, "ruler_mv", settings.size, settings.tokens, texts),
        "multi-hop": ruler_cases(engine, "ruler_vt", settings.size, settings.tokens),
        "passages": passage_cases(engine, passages, settings.size),
    }
