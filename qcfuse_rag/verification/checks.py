"""Verify a method on a model: check its exactness, and compare its answers with full prefill on generated cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import fmean

from qcfuse_rag.bundled import corpus
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.engine.exactness_check import measure_exactness
from qcfuse_rag.engine.verdict import Check, Verdict, method_digest
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.generation.decode import TextStream
from qcfuse_rag.generation.sampling import SamplingParams
from qcfuse_rag.ingestion.neighbours import nearest_chunks, token_vectors
from qcfuse_rag.monitoring.divergence import divergence
from qcfuse_rag.store.backends.memory import MemoryStore
from qcfuse_rag.verification.ruler import generate
from qcfuse_rag.verification.samples import Example

PASSAGES_PER_CASE = 4
"""Passages in a prompt of `passage_cases`."""
OPENING_WORDS = 8
UNLIMITED = 1 << 50


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt on which a method is compared with full prefill.

    A right answer contains the expected strings; without any, only the first token is compared.
    """

    question: str
    passages: tuple[str, ...]
    expected: tuple[str, ...] = ()
    max_new_tokens: int = 0


def ruler_cases(engine: FusionEngine, task: str, size: int, tokens: int, texts: Sequence[str] = ()) -> list[Case]:
    """Build cases of a RULER-style task, see `verification.ruler`, in prompts of `tokens` tokens with the answer.

    Numbers are hidden in `texts`, by default the demonstration's.
    """
    examples = ruler_examples(engine, task, size, tokens, list(texts) or list(corpus().values()))
    return [Case(each.question, each.passages, each.answers, min(each.max_new_tokens, 64)) for each in examples]


def ruler_examples(
    engine: FusionEngine, task: str, size: int, tokens: int, haystack: Sequence[str], seed: int = 0
) -> list[Example]:
    """Generate a RULER-style task for an engine's tokenizer and prompt template, see `verification.ruler`."""
    tokenizer = engine.lm.tokenizer.backend_tokenizer

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    overhead = len(engine.prompt("", ()))
    return generate(task, size, tokens=tokens, count=count, haystack=haystack, seed=seed, overhead_tokens=overhead)


def passage_cases(engine: FusionEngine, texts: Sequence[str], size: int) -> list[Case]:
    """Build cases of passages that are likely to be retrieved together.

    The question is about the opening words of one of the passages. There is no known answer: the method's first token
    is compared with full prefill's.
    """
    unique = list(dict.fromkeys(texts))
    vectors = token_vectors(engine.lm, [engine.prompts.chunk_ids(text) for text in unique])
    related = nearest_chunks(vectors, PASSAGES_PER_CASE - 1)
    step = max(1, len(unique) // size)
    cases = []
    for index in range(0, len(unique), step)[:size]:
        opening = " ".join(unique[index].split()[:OPENING_WORDS])
        passages = [unique[neighbour] for neighbour in reversed(related[index])] + [unique[index]]
        cases.append(Case(f"What do the passages say about this: {opening}?", tuple(passages)))
    return cases


def string_match(answer: str, gold: Sequence[str], *, needs_all: bool) -> float:
    """Score an answer by the gold answers that are its substrings, whatever their case.

    With `needs_all` it is the share of gold answers found, RULER's `string_match_all`; else 1 if any of them is found.
    """
    matches = [text.strip().lower() in answer.lower() for text in gold]
    return sum(matches) / len(matches) if needs_all else float(any(matches))


@dataclass(frozen=True, slots=True)
class VerifyLimits:
    """Limits that a method must keep to pass. They are this project's choice; no paper states limits.

    Attributes:
        kl: highest mean divergence of the first token's distribution from full prefill's, in nats.
        agreement: lowest share of first tokens that are full prefill's.
        loss: largest drop in the share of hidden answers found, compared with full prefill, from 0 to 1.
    """

    kl: float = 0.25
    agreement: float = 0.75
    loss: float = 0.1


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of one prompt, fused and by full prefill.

    `kl` is the divergence of the first token, in nats; scores are the shares of the expected strings in the answers.
    """

    kl: float
    agrees: bool
    fused_score: float
    full_score: float


def verify(
    engine: FusionEngine,
    method: Method,
    *,
    texts: Sequence[str] = (),
    size: int = 8,
    tokens: int = 1024,
    limits: VerifyLimits | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Compare a method with full prefill on an engine's model; nothing is stored.

    The engine's store is not used, and the method's guard is ignored, so every case is fused. There are `size` cases of
    each kind; RULER-style prompts have `tokens` tokens. Without `texts`, the demonstration's are used.

    Raises:
        QCFuseError: if the hidden texts do not fit `tokens`.
    """
    limits = limits or VerifyLimits()
    exact = measure_exactness(engine.lm)
    passages = list(texts) or [part for text in corpus().values() for part in text.split("\n\n") if len(part) > 80]
    groups = {
        "needle": ruler_cases(engine, "ruler_mv", size, tokens, texts),
        "multi-hop": ruler_cases(engine, "ruler_vt", size, tokens),
        "passages": passage_cases(engine, passages, size),
    }
    total, done = sum(map(len, groups.values())), 0
    comparisons: dict[str, list[Comparison]] = {name: [] for name in groups}
    for name, cases in groups.items():
        for case in cases:
            comparisons[name].append(_compare(engine, method.unguarded, case))
            done += 1
            if progress is not None:
                progress(done, total)
    everything = [comparison for group in comparisons.values() for comparison in group]
    kl = fmean(comparison.kl for comparison in everything)
    agreement = fmean(comparison.agrees for comparison in everything)
    checks = [
        Check("exactness", exact.largest, exact.tolerance, False, "largest logit error, in sd"),
        Check("kl", kl, limits.kl, False, f"nats, first token, {total} prompts"),
        Check("top-1", agreement, limits.agreement, True, f"first tokens, {total} prompts"),
        *(_loss_check(name, comparisons[name], limits.loss) for name in ("needle", "multi-hop")),
    ]
    date = datetime.now(UTC).isoformat(timespec="seconds")
    label = f"{method.name} over {method.base.name}" if method.base else method.name
    ratio = "" if method.ratio is None else f" at ratio {method.ratio:g}"
    return Verdict(
        engine.lm.fingerprint.digest, method_digest(engine.lm, engine.store, method), label + ratio, date, tuple(checks)
    )


def _compare(engine: FusionEngine, method: Method, case: Case) -> Comparison:
    """Warm a case's passages in a store of its own, and answer the case fused and by full prefill."""
    with MemoryStore(UNLIMITED, numbers=engine.store.numbers) as store:
        scratch = FusionEngine(engine.lm, store, template=engine.prompts.template, method=method)
        scratch.warm(case.passages)
        prompt = scratch.prompt(case.question, case.passages)
        fused = scratch.prefill(prompt, answer_tokens=case.max_new_tokens)
        full = scratch.prefill(prompt, method=method.as_full_prefill, answer_tokens=case.max_new_tokens)
        agrees = int(fused.logits.argmax()) == int(full.logits.argmax())
        kl = divergence(full.logits, fused.logits)
        return Comparison(kl, agrees, _score(engine, fused, case), _score(engine, full, case))


def _score(engine: FusionEngine, prefilled: Prefilled, case: Case) -> float:
    if not case.expected:
        return 0.0
    params = SamplingParams(max_new_tokens=case.max_new_tokens)
    answer = TextStream(engine.runner, prefilled, params).result().text
    return string_match(answer, case.expected, needs_all=True)


def _loss_check(name: str, group: Sequence[Comparison], limit: float) -> Check:
    full = fmean(comparison.full_score for comparison in group)
    fused = fmean(comparison.fused_score for comparison in group)
    detail = f"share of answers lost: full prefill finds {full:.0%}, fused {fused:.0%} of {len(group)} prompts'"
    if not full:
        detail += "; the model cannot solve this task at all, so the check says nothing about the method"
    return Check(name, max(0.0, full - fused), limit, False, detail)
