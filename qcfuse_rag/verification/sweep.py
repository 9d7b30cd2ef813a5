"""Verify a method on a model: find the smallest ratio at which its answers are near full prefill's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from qcfuse_rag.bundled import paragraphs
from qcfuse_rag.fusion.method import FixedRatio, Method, Ratio, VerifiedRatio
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.runtime.residuals import ResidualKernel
from qcfuse_rag.store.backends.memory import UNLIMITED, MemoryStore
from qcfuse_rag.verification.cases import Case, passage_cases, ruler_cases, string_match
from qcfuse_rag.verification.divergence import Divergence, answer_text, compare_greedy_answers, greedy_answers
from qcfuse_rag.verification.exactness import measure_exactness
from qcfuse_rag.verification.verdict import EXACTNESS, Check, Trial, Verdict, method_digest

if TYPE_CHECKING:
    from qcfuse_rag.engine.engine import FusionEngine

RATIOS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75)

CACHED_BYTES = 4 << 30
"""Most bytes of warmed passages that stay for the next candidates; the passages beyond are prefilled again."""

COMPARED_TOKENS = 64
"""Most tokens of an answer that are compared."""

TOGETHER = 8
"""Answers that are decoded together: a step reads the weights once for all of them."""


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """What to verify a method on, and the limits that it must keep. The limits are this project's own."""

    ratios: Sequence[float] = RATIOS  # to try, where the method leaves its ratio to the verdict
    size: int = 8  # prompts of each of the three kinds
    tokens: int = 1024  # of a RULER-style prompt
    kl: float = 0.25  # highest mean divergence from full prefill along its answers, in nats a token
    agreement: float = 0.75  # lowest share of the tokens of full prefill's answers that the method predicts
    residuals: bool = True  # whether a ratio that fails is tried once more with residuals
    loss: float = 0.1  # largest drop in the share of hidden answers found, compared with full prefill


QUICK: dict[str, Any] = {"ratios": (0.1, 0.2, 0.4), "size": 5, "residuals": False}
"""Settings that take at most three minutes on two cores for a model of 0.5B."""


def candidates(method: Method, ratios: Sequence[float]) -> list[Method]:
    """Return what to try of a method: each ratio in ascending order if it has a `VerifiedRatio`, else itself."""
    if not isinstance(method.budget, VerifiedRatio):
        return [method]
    return [replace(method, budget=FixedRatio(ratio)) for ratio in sorted(set(ratios))]


def verify(
    engine: FusionEngine,
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
        ValueError: if there is no ratio to try.
    """
    settings = settings or VerifySettings()
    tried_methods = candidates(method.unguarded, settings.ratios)
    if not tried_methods:
        raise ValueError("name at least one ratio to try")
    groups = _cases(engine, texts, settings)
    # Only on a CPU: the GPU's kernels and recorded passes move no tokens, and one such request would slow the batch.
    is_plain = method.base is not None and method.layer_hook is None and method.residuals is None
    tries = settings.residuals and engine.lm.device.type == "cpu"
    moves = tries and is_plain and isinstance(method.budget, Ratio) and method.ratio != 0
    done, total = 0, sum(map(len, groups.values())) * (1 + len(tried_methods) * (1 + moves))

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    exact = measure_exactness(engine.lm)
    exactness = Check(EXACTNESS, exact.largest, exact.tolerance, False, "largest logit error, in sd")
    answers = References(engine, method.unguarded, advance)
    references = {kind: answers.answer(cases) for kind, cases in groups.items()}
    tried: list[Trial] = []

    def judge(candidate: Method) -> None:
        comparisons = {kind: answers.compare(group, candidate) for kind, group in references.items()}
        checks = (exactness, *answer_checks(comparisons, settings))
        tried.append(Trial(candidate.ratio, checks, candidate.residuals is not None))

    for candidate in tried_methods:
        judge(candidate)
        if not tried[-1].passed and moves:
            judge(replace(candidate, residuals=ResidualKernel()))
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


def _cases(engine: FusionEngine, texts: Sequence[str], settings: VerifySettings) -> dict[str, list[Case]]:
    cases = {
        "needle": ruler_cases(engine, "ruler_mv", settings.size, settings.tokens, texts),
        "multi-hop": ruler_cases(engine, "ruler_vt", settings.size, settings.tokens),
        "passages": passage_cases(engine, list(texts) or paragraphs(), settings.size),
    }
    return {
        kind: [replace(case, max_new_tokens=min(case.max_new_tokens, COMPARED_TOKENS)) for case in group]
        for kind, group in cases.items()
    }


@dataclass(frozen=True, slots=True)
class Comparison:
    """A method's answer to one prompt beside full prefill's; scores are shares of the expected strings."""

    divergence: Divergence
    score: float
    full_score: float


def answer_checks(comparisons: Mapping[str, Sequence[Comparison]], settings: VerifySettings) -> list[Check]:
    """Check a method's answers by kind of case; every prompt counts the same, however long its answer."""
    everything = [comparison.divergence for group in comparisons.values() for comparison in group]
    answers = f"full prefill's answers to {len(everything)} prompts"
    kl = [divergence.mean_kl for divergence in everything]
    top1 = [divergence.top1 for divergence in everything]
    identical = fmean(divergence.identical for divergence in everything)
    return [
        _mean_check("kl", kl, settings.kl, False, f"divergence along {answers}, nats a token"),
        _mean_check("top-1", top1, settings.agreement, True, f"share of the tokens of {answers} that are predicted"),
        Check("identical", identical, None, True, f"share of {answers} that are the same word for word; no limit"),
        *(_loss_check(kind, comparisons[kind], settings.loss) for kind in ("needle", "multi-hop")),
    ]


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and highest mean that values speak for: 95 %, by bootstrap."""
    drawn = np.random.default_rng(0).choice(values, (2000, len(values))).mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975)).tolist()
    return low, high


def _mean_check(name: str, values: Sequence[float], limit: float, at_least: bool, detail: str) -> Check:
    low, high = mean_interval(values)
    return Check(name, fmean(values), limit, at_least, f"{detail}; could be between {low:.3g} and {high:.3g}")


def _loss_check(kind: str, group: Sequence[Comparison], limit: float) -> Check:
    full = fmean(comparison.full_score for comparison in group)
    fused = fmean(comparison.score for comparison in group)
    detail = f"hidden answers found in {len(group)} prompts: full prefill {full:.0%}, fused {fused:.0%}"
    if not full:
        detail += "; the model cannot solve this task at all, so the check says nothing about the method"
    return Check(kind, max(0.0, full - fused), limit, False, detail)


@dataclass(slots=True, eq=False)
class Reference:
    """A case with full prefill's answer. Keys and values of full prefill are not kept."""

    case: Case
    store: MemoryStore | None  # of the case's passages; None if they are prefilled anew for each candidate
    ids: tuple[int, ...] = ()
    logits: Tensor = field(default_factory=lambda: torch.empty(0))  # `[N, vocabulary]` float32, on the CPU
    score: float = 0.0  # share of the expected strings in the answer
    tokens: int = 0  # of the prompt and the longest answer


class References:
    """Full prefill's answers to cases on an engine's model, computed once for all candidates of a method."""

    def __init__(self, engine: FusionEngine, method: Method, advance: Callable[[], None]) -> None:
        self._engine, self._method, self._advance = engine, method, advance
        self._cached_bytes = 0

    def answer(self, cases: Sequence[Case]) -> list[Reference]:
        """Answer cases of one kind, whose answers have the same length limit, by full prefill."""
        references = [Reference(case, self._new_store(), tokens=self._tokens(case)) for case in cases]
        for group in self._groups(references):
            prefilled = [self._prefill(reference, self._method.as_full_prefill) for reference in group]
            answers = greedy_answers(self._engine.runner, prefilled, group[0].case.max_new_tokens)
            for reference, (ids, logits) in zip(group, answers, strict=True):
                reference.ids, reference.logits = ids, logits.cpu()
                reference.score = self._score(reference.case, ids)
                self._bound_store(reference)
            del prefilled  # frees keys and values before the next group
        return references

    def compare(self, references: Sequence[Reference], method: Method) -> list[Comparison]:
        """Answer cases by a method, and compare with full prefill; answers that differ are decoded to be scored."""
        comparisons: list[Comparison] = []
        for group in self._groups(references):
            prefilled = [self._prefill(reference, method) for reference in group]
            limit, is_scored = group[0].case.max_new_tokens, any(reference.case.expected for reference in group)
            full = [(reference.ids, reference.logits) for reference in group]
            answers = compare_greedy_answers(self._engine.runner, full, prefilled, limit, decode=is_scored)
            for reference, answer in zip(group, answers, strict=True):
                score = self._score(reference.case, answer.ids or ())
                comparisons.append(Comparison(answer.divergence, score, reference.score))
            del prefilled  # frees keys and values before the next group
        return comparisons

    def _new_store(self) -> MemoryStore:
        return MemoryStore(UNLIMITED, kv_dtype=self._engine.store.kv_dtype)

    def _prefill(self, reference: Reference, method: Method) -> Prefilled:
        """Warm the case's passages where they are not stored, and prefill its prompt."""
        case, store = reference.case, reference.store or self._new_store()
        engine = self._engine.over(store, self._method)
        if case.passages and self._method.base is not None:
            first, rest = case.passages[:1], case.passages[1:]  # all may be neighbours of all
            engine.warm(first, others=rest)  # only a prompt's first passage is read under other bases too
            engine.warm(rest, bases=self._method.bases[:1], others=first)
        prompt = engine.prompt(case.question, case.passages)
        prefilled = engine.prefill(prompt, method=method, answer_tokens=case.max_new_tokens)
        self._advance()
        return prefilled

    def _groups(self, references: Sequence[Reference]) -> Iterator[Sequence[Reference]]:
        tokens = max((reference.tokens for reference in references), default=1)
        prompt_bytes = tokens * self._engine.lm.kv_bytes_per_token
        size = max(1, min(TOGETHER, CACHED_BYTES // prompt_bytes))
        return (references[start : start + size] for start in range(0, len(references), size))

    def _tokens(self, case: Case) -> int:
        return len(self._engine.prompt(case.question, case.passages)) + case.max_new_tokens

    def _bound_store(self, reference: Reference) -> None:
        size_bytes = 0 if reference.store is None else reference.store.stats()[0].size_bytes
        if self._cached_bytes + size_bytes > CACHED_BYTES:
            reference.store = None
        else:
            self._cached_bytes += size_bytes

    def _score(self, case: Case, ids: Sequence[int]) -> float:
        text = answer_text(self._engine.lm, ids)
        return string_match(text, case.expected, needs_all=True) if case.expected else 0.0
