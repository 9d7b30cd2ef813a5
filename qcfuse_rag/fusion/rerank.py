"""Order passages by the likelihood of a question behind each of them, read from stored caches.

A passage's score is the mean log-likelihood of the question's tokens behind the system prefix and that passage alone
(Sachan et al., UPR, arXiv 2204.07496). Only the question's rows are computed, those of many passages in one pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qcfuse_rag.errors import InvalidSetting, InvalidTemplate
from qcfuse_rag.fusion.lookup import Lookups, plan_lookups
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.report import Lookup, describe_misses
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.prompts.segments import Prompt, Role
from qcfuse_rag.runtime.forward import forward_batch
from qcfuse_rag.runtime.loading.layer_loader import WaitBudget
from qcfuse_rag.runtime.loading.sources import LateMissError
from qcfuse_rag.runtime.rows import BatchPlan, RowsPlan
from qcfuse_rag.runtime.runner import ModelRunner

QUESTION_CHARACTERS = 1000
"""Characters at the end of a question by which passages are ordered: all of them are computed for each passage."""
ROWS = 256
"""Most rows of a pass over several passages; more take no less time each, and more memory."""
SCORED_TOKENS = 256
"""Most tokens of a question that are scored, the last ones; the scores of one take a number for each word."""
PASS_BYTES = 1 << 30
"""Most bytes of keys and values of a pass over several passages."""


@dataclass(frozen=True, slots=True)
class Reranking:
    """Passages in the order of their scores.

    Attributes:
        likelihoods: of each passage, in the order given: the question's mean log-likelihood a token, in nats.
        scores: what orders them: the likelihoods, or their sum with the retriever's scores, both standardised.
        order: indices of the best passages, best first.
        lookups: for each passage, whether its keys and values were reused.
        prompt_tokens: tokens of all passages, each with the system prefix and the question.
        rows: rows computed: the question's for each passage, and those of passages that the store had not.
        bytes_loaded: bytes read from the store.
        seconds: how long it took.
    """

    likelihoods: tuple[float, ...] = ()
    scores: tuple[float, ...] = ()
    order: tuple[int, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    prompt_tokens: int = 0
    rows: int = 0
    bytes_loaded: int = 0
    seconds: float = 0.0

    @property
    def relevance(self) -> tuple[float, ...]:
        """The likelihood behind each passage as a number from 0 to 1: the geometric mean over the question's tokens."""
        return tuple(map(math.exp, self.likelihoods))

    @property
    def reused(self) -> int:
        """Number of passages whose keys and values were reused."""
        return sum(lookup.hit for lookup in self.lookups)

    @property
    def fallback(self) -> str | None:
        """How many passages were computed in full and why; None if all were found."""
        return describe_misses(list(self.lookups))

    @property
    def summary(self) -> str:
        """What was reused and computed, in one line."""
        line = (
            f"{self.reused} of {len(self.scores)} passages reused, computed {self.rows:,} of {self.prompt_tokens:,} "
            f"tokens, loaded {self.bytes_loaded / 1e6:,.1f} MB, {self.seconds:.2f} s"
        )
        return f"{line}; {self.fallback}" if self.fallback else line

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as plain data for JSON, without reasons."""
        counts = {name: getattr(self, name) for name in ("reused", "prompt_tokens", "rows", "bytes_loaded", "seconds")}
        return {"passages": len(self.scores), **counts}


def question_range(prompt: Prompt) -> tuple[int, int]:
    """Return the positions behind the passage up to the end of the question, `start <= p < stop`.

    Raises:
        InvalidSetting: if the question has no text.
        InvalidTemplate: if the question precedes the passages, or follows them directly.
    """
    start = max((span.stop for span in prompt.chunks), default=len(prompt.prefix_ids))
    asked = next((span for span in prompt.spans if span.segment.role is Role.QUESTION), None)
    if asked is None:
        raise InvalidSetting("a question without text orders no passages", "query")
    if asked.start <= start:  # its first token follows a row that is computed
        raise InvalidTemplate("this wording has the question before the passages, or no text between them")
    return start, asked.stop


@torch.inference_mode()
def rerank_prompts(
    runner: ModelRunner,
    prompts: Sequence[Prompt],
    method: Method,
    retrieved: Sequence[float | None] | None,
    top_k: int | None,
) -> Reranking:
    """Order the passages of prompts of the same question, each over one passage.

    Every failure to read a passage makes its tokens rows, which are computed.

    Args:
        runner: the model and the store.
        prompts: the prompts, at least one.
        method: under which bases the passages are looked up.
        retrieved: see `FusionEngine.rerank`.
        top_k: number of passages in the order; None for all.
    """
    started, wait_budget = time.perf_counter(), WaitBudget(runner.load_limit_s)
    method = Method(method.name, method.base, fallbacks=method.fallbacks)
    likelihoods, lookups, rows, nbytes = list[float](), list[Lookup](), 0, 0
    first, stop = question_range(prompts[0])
    prompt_bytes = max(map(len, prompts)) * runner.lm.kv_bytes_per_token
    step = max(1, min(ROWS // (stop - first), PASS_BYTES // prompt_bytes))
    try:
        for start in range(0, len(prompts), step):
            placed = [place_passages(runner, prompt, method, wait_budget) for prompt in prompts[start : start + step]]
            likelihoods += question_likelihoods(placed)
            lookups += [lookup for fused in placed for lookup in fused.lookups if lookup.role == Role.CHUNK]
            rows += sum(fused.row_layers for fused in placed) // runner.lm.n_layers + len(placed) * (stop - first)
            nbytes += sum(fused.bytes_loaded for fused in placed)
            del placed  # before the next ones are loaded
    finally:
        wait_budget.close()
    scores = likelihoods
    if retrieved is not None:
        known = [float(-rank) if None in retrieved else float(score or 0) for rank, score in enumerate(retrieved)]
        scores = (standardized(likelihoods) + standardized(known)).tolist()
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_k]
    tokens = sum(question_range(prompt)[1] for prompt in prompts)
    seconds = time.perf_counter() - started
    return Reranking(tuple(likelihoods), tuple(scores), tuple(order), tuple(lookups), tokens, rows, nbytes, seconds)


def standardized(scores: Sequence[float]) -> Tensor:
    """Return scores with mean 0 and deviation 1, float64; zeros if all are equal."""
    found = torch.tensor(scores, dtype=torch.float64)
    found -= found.mean()
    return found / found.square().mean().sqrt().clamp_min(1e-12)


def place_passages(runner: ModelRunner, prompt: Prompt, method: Method, wait_budget: WaitBudget) -> FusedPrompt:
    """Place a prompt's stored passages, and compute those that the store has not; no row behind them is computed."""
    make_plan = partial(plan_lookups, runner.lm, runner.store, prompt, priced=False)
    try:
        plan = wait_budget.call(lambda: make_plan(method))
    except TimeoutError:  # no time is left to read anything either
        plan = make_plan(replace(method, fallbacks=()))
    lookups = Lookups(plan, wait_budget)
    while True:
        fused = FusedPrompt.empty(runner, prompt, len(prompt))
        try:
            fused.load(lookups.outcomes(), wait_budget)
            fused.await_all()
            break
        except LateMissError as late:
            lookups.reject(late)
        finally:
            fused.stop()
    absent = (~fused.known[: question_range(prompt)[0]]).nonzero()[:, 0]
    if len(absent):
        rows = RowsPlan.of(absent, runner.lm.sliding, device=runner.lm.device)
        runner.prefills.hidden(fused.ids[rows.rows], rows, fused.await_all(), depth=runner.lm.n_layers)
        fused.row_layers += len(absent) * runner.lm.n_layers
    return fused


def question_likelihoods(placed: Sequence[FusedPrompt]) -> list[float]:
    """Return the mean log-likelihood of the question's last tokens behind each passage, in nats."""
    prompt = placed[0].prompt
    start, stop = question_range(prompt)
    tokens = next(min(len(span), SCORED_TOKENS) for span in prompt.spans if span.segment.role is Role.QUESTION)
    lm, firsts = placed[0].lm, [question_range(fused.prompt)[0] for fused in placed]
    plans = [RowsPlan.between(first, first + stop - start, lm.device, lm.sliding) for first in firsts]
    batch = BatchPlan(plans, [fused.await_all() for fused in placed])
    ids = torch.tensor(prompt.ids[start:stop], device=lm.device)
    logits = forward_batch(lm, ids, batch, last=tokens + 1)[:, :-1]
    asked = torch.tensor(prompt.ids[stop - tokens : stop], device=logits.device).expand(len(placed), -1)
    found: list[float] = logits.log_softmax(-1).gather(2, asked[:, :, None]).mean((1, 2)).tolist()
    return found
