"""Verify a method on a model: exact where it must be, and near full prefill where it need not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from qcfuse_rag.monitoring.divergence import divergence
from qcfuse_rag.store.backends.memory import MemoryStore
from qcfuse_rag.verification.cases import Case, hidden, own, string_match

UNLIMITED = 1 << 50


@dataclass(frozen=True, slots=True)
class Limits:
    """What a method has to reach to pass; ours, since no paper names any.

    Attributes:
        kl: most mean divergence of the first token's distribution from full prefill's, in nats.
        agreement: least share of first tokens that are full prefill's.
        loss: most share of hidden answers that may be lost against full prefill, in points from 0 to 1.
    """

    kl: float = 0.25
    agreement: float = 0.75
    loss: float = 0.1


@dataclass(frozen=True, slots=True)
class Compared:
    """What one prompt came to, fused and in full."""

    kl: float
    agrees: bool
    found: float
    full_found: float


def verify(
    engine: FusionEngine,
    method: Method,
    *,
    texts: Sequence[str] = (),
    size: int = 8,
    tokens: int = 1024,
    limits: Limits | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Compare a method with full prefill on an engine's model; nothing is stored.

    Args:
        engine: whose model and wording of the prompt are used; its store is not touched.
        method: what is verified, without its guard: what it would refuse to fuse is fused here.
        texts: the user's own passages; the demonstration's if there are none.
        size: cases of each kind.
        tokens: length of the prompts with something hidden.
        limits: what it has to reach.
        progress: called with cases `(done, total)`.

    Raises:
        QCFuseError: if what is hidden does not fit `tokens`.
    """
    held = limits or Limits()
    exact = measure_exactness(engine.lm)
    passages = list(texts) or [part for text in corpus().values() for part in text.split("\n\n") if len(part) > 80]
    groups = {
        "needle": hidden(engine, "ruler_mv", size, tokens, texts),
        "multi-hop": hidden(engine, "ruler_vt", size, tokens),
        "own": own(engine, passages, size),
    }
    total, done = sum(map(len, groups.values())), 0
    found: dict[str, list[Compared]] = {}
    for name, cases in groups.items():
        for case in cases:
            found.setdefault(name, []).append(_compare(engine, replace(method, guard=None), case))
            done += 1
            if progress is not None:
                progress(done, total)
    everything = [one for group in found.values() for one in group]
    checks = [
        Check("exactness", exact.largest, exact.tolerance, False, "largest logit error, in sd"),
        Check("kl", fmean(one.kl for one in everything), held.kl, False, f"nats, first token, {total} prompts"),
        Check("top-1", fmean(one.agrees for one in everything), held.agreement, True, f"first tokens, {total} prompts"),
        *(_lost(name, found[name], held.loss) for name in ("needle", "multi-hop")),
    ]
    date = datetime.now(UTC).isoformat(timespec="seconds")
    label = f"{method.name} over {method.base.name}" if method.base else method.name
    ratio = "" if method.ratio is None else f" at ratio {method.ratio:g}"
    return Verdict(
        engine.lm.fingerprint.digest, method_digest(engine.lm, engine.store, method), label + ratio, date, tuple(checks)
    )


def _compare(engine: FusionEngine, method: Method, case: Case) -> Compared:
    """Warm a case's passages for itself, so that whatever is compared stands alone, and answer it both ways."""
    with MemoryStore(UNLIMITED, numbers=engine.store.numbers) as store:
        scratch = FusionEngine(engine.lm, store, template=engine.prompts.template, method=method)
        scratch.warm(case.passages)
        prompt = scratch.prompt(case.question, case.passages)
        fused = scratch.prefill(prompt, room=case.max_new_tokens)
        full = scratch.prefill(prompt, method=method.as_full_prefill, room=case.max_new_tokens)
        agrees = int(fused.logits.argmax()) == int(full.logits.argmax())
        kl = divergence(full.logits, fused.logits)
        return Compared(kl, agrees, *(_found(engine, one, case) for one in (fused, full)))


def _found(engine: FusionEngine, prefilled: Prefilled, case: Case) -> float:
    if not case.expected:
        return 0.0
    params = SamplingParams(max_new_tokens=case.max_new_tokens)
    answer = TextStream(engine.lm, prefilled, params).result().text
    return string_match(answer, case.expected, needs_all=True)


def _lost(name: str, group: Sequence[Compared], limit: float) -> Check:
    full, fused = fmean(one.full_found for one in group), fmean(one.found for one in group)
    detail = f"share of answers lost: full prefill finds {full:.0%}, fused {fused:.0%} of {len(group)} prompts'"
    if not full:
        detail += "; the model cannot do this at all, which says nothing of the method"
    return Check(name, max(0.0, full - fused), limit, False, detail)
