"""Verify a method on a model: find the smallest ratio at which its answers are near full prefill's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from qcfuse_rag.bundled import corpus
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.engine.exactness_check import measure_exactness
from qcfuse_rag.engine.verdict import EXACTNESS, Check, Trial, Verdict, method_digest
from qcfuse_rag.fusion.budgets import FixedRatio, VerifiedRatio
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.generation.teacher_forcing import answer_logits, greedy_answer
from qcfuse_rag.monitoring.divergence import compare_answers
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.store.backends.memory import MemoryStore
from qcfuse_rag.verification.checks import (
    UNLIMITED,
    Case,
    Comparison,
    VerifyLimits,
    answer_checks,
    passage_cases,
    ruler_cases,
    string_match,
)

RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
KEPT_BYTES = 4 << 30
"""Most bytes of warmed passages that are kept for the next candidates; the passages beyond are prefilled again."""

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
    return [(f"ratio {each.ratio:g}" if each.ratio is not None else "its own ratio", each) for each in methods]


def verify(
    engine: FusionEngine,
    method: Method,
    *,
    texts: Sequence[str] = (),
    settings: VerifySettings | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Compare a method's answers with full prefill's, from the smallest ratio up to the first that passes.

    The engine's store is not used, and nothing is stored. The method's guard is ignored, so every prompt is fused.

    Args:
        engine: its model, template and number format count; its method does not.
        method: the method.
        texts: the user's passages; by default the demonstration's.
        settings: prompts, ratios and limits.
        progress: called with the number of prefilled prompts, and the number if every candidate is tried.

    Raises:
        QCFuseError: if the hidden texts do not fit the prompts.
        ValueError: if there is no ratio to try, or it is no fraction.
    """
    settings = settings or VerifySettings()
    tried_methods = candidates(method.unguarded, settings.ratios)
    if not tried_methods:
        raise ValueError("name at least one ratio to try")
    groups = _cases(engine, texts, settings)
    done, total = 0, sum(map(len, groups.values())) * (1 + len(tried_methods))

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    exact = measure_exactness(engine.lm)
    exactness = Check(EXACTNESS, exact.largest, exact.tolerance, False, "largest logit error, in sd")
    references: dict[str, list[_Reference]] = {kind: [] for kind in groups}
    kept_bytes = 0
    for kind, cases in groups.items():
        for case in cases:
            reference = _Reference(engine, method.unguarded, case)
            if kept_bytes + reference.store_bytes > KEPT_BYTES:
                reference.store = None
            kept_bytes += reference.store_bytes
            references[kind].append(reference)
            advance()
    tried: list[Trial] = []
    for label, candidate in tried_methods:
        comparisons: dict[str, list[Comparison]] = {kind: [] for kind in groups}
        for kind, group in references.items():
            for reference in group:
                comparisons[kind].append(reference.compare(candidate))
                advance()
        tried.append(Trial(label, candidate.ratio, (exactness, *answer_checks(comparisons, settings.limits))))
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
    passages = list(texts) or [part for text in corpus().values() for part in text.split("\n\n") if len(part) > 80]
    return {
        "needle": ruler_cases(engine, "ruler_mv", settings.size, settings.tokens, texts),
        "multi-hop": ruler_cases(engine, "ruler_vt", settings.size, settings.tokens),
        "passages": passage_cases(engine, passages, settings.size),
    }


class _Reference:
    """A case with full prefill's answer, which is computed once, and a store with its passages.

    Only the answer and its `[N, vocabulary]` logits are kept of full prefill, on the CPU. Without a store, each
    comparison prefills the passages again.
    """

    def __init__(self, engine: FusionEngine, method: Method, case: Case) -> None:
        self._engine, self._case = engine, case
        self.store: MemoryStore | None = MemoryStore(UNLIMITED, numbers=engine.store.numbers)
        scratch, prompt = self._warm(self.store, method)
        full = scratch.prefill(prompt, method=method.as_full_prefill, answer_tokens=case.max_new_tokens)
        self._ids, logits = greedy_answer(scratch.runner, full, case.max_new_tokens)
        self._logits = logits.cpu()
        self._score = self._score_of(self._ids)

    @property
    def store_bytes(self) -> int:
        """The bytes that the store takes."""
        return 0 if self.store is None else self.store.stats()[0].size_bytes

    def compare(self, method: Method) -> Comparison:
        """Prefill the case by a method, and compare its answer with full prefill's.

        An identical answer has the same score; any other is decoded to be scored.
        """
        scratch, prompt = self._warm(self.store or MemoryStore(UNLIMITED, numbers=self._engine.store.numbers), method)
        fused = scratch.prefill(prompt, answer_tokens=self._case.max_new_tokens)
        divergence = compare_answers(self._logits, answer_logits(scratch.runner, fused, self._ids).cpu())
        score = self._score
        if self._case.expected and not divergence.identical:
            score = self._score_of(greedy_answer(scratch.runner, fused, self._case.max_new_tokens)[0])
        return Comparison(divergence, score, self._score)

    def _warm(self, store: MemoryStore, method: Method) -> tuple[FusionEngine, Prompt]:
        """Return an engine over a store with the case's passages, and the prompt."""
        engine = FusionEngine(self._engine.lm, store, template=self._engine.prompts.template, method=method)
        engine.warm(self._case.passages)
        return engine, engine.prompt(self._case.question, self._case.passages)

    def _score_of(self, ids: Sequence[int]) -> float:
        if not self._case.expected:
            return 0.0
        text = self._engine.lm.tokenizer.decode(ids, skip_special_tokens=True)
        return string_match(text, self._case.expected, needs_all=True)
