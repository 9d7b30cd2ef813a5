"""Cases with full prefill's answers, and the comparison of a method's answers with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.generation.teacher_forcing import greedy_answers
from qcfuse_rag.store.backends.memory import UNLIMITED, MemoryStore
from qcfuse_rag.verification.checks import Case, Comparison, Engine, string_match
from qcfuse_rag.verification.divergence import GreedyAnswer, answer_text, compare_greedy_answers

KEPT_BYTES = 4 << 30
"""Most bytes of warmed passages that are kept for the next candidates; the passages beyond are prefilled again."""

TOGETHER = 8
"""Answers that are decoded together: a step reads the weights once for all of them."""


@dataclass(slots=True, eq=False)
class Reference:
    """A case with full prefill's answer. Keys and values of full prefill are not kept.

    Attributes:
        case: the case.
        store: holds the case's passages; None if they are prefilled anew for each candidate.
        ids: token ids of full prefill's greedy answer.
        logits: `[N, vocabulary]` float32, on the CPU, before each of them.
        score: share of the expected strings in the answer.
    """

    case: Case
    store: MemoryStore | None
    ids: tuple[int, ...] = ()
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    score: float = 0.0


class ReferenceAnswers:
    """Full prefill's answers to cases on an engine's model, computed once for all candidates.

    Args:
        engine: its model, template and number format count.
        method: warms passages for this method's bases.
        advance: called after each prefill that is compared or kept.
    """

    def __init__(self, engine: Engine, method: Method, advance: Callable[[], None]) -> None:
        self._engine, self._method, self._advance = engine, method, advance
        self._kept_bytes = 0

    def answer(self, cases: Sequence[Case]) -> list[Reference]:
        """Answer cases of one kind, whose answers have the same length limit, by full prefill."""
        references = self._references(cases)
        for group in self._groups(references):
            for reference, _, (ids, logits) in self._answered(group):
                reference.ids, reference.logits = ids, logits.cpu()
                reference.score = self._score(reference.case, ids)
                self._bound_store(reference)
        return references

    def compare(self, references: Sequence[Reference], method: Method) -> list[Comparison]:
        """Answer the cases by a method, and compare the answers with full prefill's.

        Answers that differ are decoded where they are scored.
        """
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

    def _references(self, cases: Sequence[Case]) -> list[Reference]:
        return [Reference(case, MemoryStore(UNLIMITED, numbers=self._engine.store.numbers)) for case in cases]

    def _answered(self, group: Sequence[Reference]) -> Iterator[tuple[Reference, Prefilled, GreedyAnswer]]:
        """Yield each case with its full prefill, and with its greedy answer and the logits before each token."""
        prefilled = [self._prefill(reference, self._method.as_full_prefill) for reference in group]
        answers = greedy_answers(self._engine.runner, prefilled, group[0].case.max_new_tokens)
        yield from zip(group, prefilled, answers, strict=True)

    def _prefill(self, reference: Reference, method: Method) -> Prefilled:
        """Warm the case's passages where they are not stored, and prefill its prompt."""
        case, store = reference.case, reference.store or MemoryStore(UNLIMITED, numbers=self._engine.store.numbers)
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
        """Split references into groups whose keys and values fit `KEPT_BYTES` together."""
        tokens = [
            len(self._engine.prompt(reference.case.question, reference.case.passages)) + reference.case.max_new_tokens
            for reference in references
        ]
        prompt_bytes = max(tokens, default=1) * self._engine.lm.kv_bytes_per_token
        size = max(1, min(TOGETHER, KEPT_BYTES // prompt_bytes))
        return (references[start : start + size] for start in range(0, len(references), size))

    def _bound_store(self, reference: Reference) -> None:
        """Drop the passages of a case that would exceed the bytes to keep."""
        size_bytes = 0 if reference.store is None else reference.store.stats()[0].size_bytes
        if self._kept_bytes + size_bytes > KEPT_BYTES:
            reference.store = None
        else:
            self._kept_bytes += size_bytes

    def _score(self, case: Case, ids: Sequence[int]) -> float:
        if not case.expected:
            return 0.0
        return string_match(answer_text(self._engine.lm, ids), case.expected, needs_all=True)
