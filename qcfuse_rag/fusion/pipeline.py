"""Fused prefill: place the stored chunks, probe, select, recompute, and arrive at the first token."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.fusion.estimate import estimate_prefill
from qcfuse_rag.fusion.guard import PrefillEstimate, predict_fused_s
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.prefix_cache import PrefixLease
from qcfuse_rag.fusion.recompute import PartRows, Parts, complete, recompute
from qcfuse_rag.fusion.report import FusionReport, Timings, describe_misses
from qcfuse_rag.fusion.selectors import Selection, check_selection, recomputable_chunks
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.attention.scores import Scores
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.layer_hooks import LayerHook, NestedRows
from qcfuse_rag.runtime.loading.device_timer import DeviceTimestamp
from qcfuse_rag.runtime.loading.source import LateMissError
from qcfuse_rag.runtime.loading.wait_budget import WaitBudget
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.quantization import LOSSLESS

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """A prompt ready to be continued.

    Attributes:
        prompt: the prompt.
        logits: `[vocabulary]` float32, scores of the first new token.
        buffer: keys and values of the whole prompt, with capacity for the answer.
        report: what was done.
        scores: the probe's scores, if there was a probe.
        exact_tokens: number of leading positions whose keys and values are full prefill's; the whole prompt if
            everything was computed. Recomputed positions behind stale ones do not count.
        lease: keeps prompt and answer for later prompts that begin with them; None if they are not kept.
    """

    prompt: Prompt
    logits: Tensor
    buffer: KVBuffer
    report: FusionReport
    scores: Scores | None = None
    exact_tokens: int = 0
    lease: PrefixLease | None = None


def prefill(runner: ModelRunner, prompt: Prompt, method: Method, *, answer_tokens: int = 0) -> Prefilled:
    """Bring a prompt to its first token; see `prefill_in_parts`.

    Raises:
        PromptTooLong: if prompt and answer do not fit the model's context window.
        ValueError: if the method's selector breaks its contract.
    """
    return complete(prefill_in_parts(runner, prompt, method, answer_tokens=answer_tokens))


@torch.inference_mode()
def prefill_in_parts(
    runner: ModelRunner,
    prompt: Prompt,
    method: Method,
    *,
    answer_tokens: int = 0,
    lease: PrefixLease | None = None,
    part_rows: PartRows | None = None,
) -> Parts[Prefilled]:
    """Bring a prompt to its first token, in parts between which other requests may compute.

    Every failure to read a chunk makes the chunk's tokens rows, which are computed.

    Args:
        runner: the model and the store.
        prompt: the prompt.
        method: what to reuse and what to recompute.
        answer_tokens: tokens to reserve for the answer.
        lease: the beginning that earlier requests have computed; None for nothing.
        part_rows: the most rows of a part; None for one part. A method with a layer hook computes its rows in one part.

    Raises:
        PromptTooLong: if prompt and answer do not fit the model's context window.
        ValueError: if the method's selector breaks its contract.
    """
    check_window(runner.lm, prompt, answer_tokens)
    started = time.perf_counter()
    wait_budget = WaitBudget(runner.load_limit_s)
    decision = _ask_guard(runner, prompt, method, wait_budget, 0 if lease is None else lease.held)
    refusal = decision.refusal
    if refusal is not None and lease is not None:
        lease.keep_exact_only()  # full prefill is exact
    attempt = PrefillAttempt(
        runner, method if refusal is None else method.as_full_prefill, lease, part_rows, wait_budget
    )
    refused: dict[int, Miss] = {}
    while True:  # every turn does without at least one chunk more
        fused = FusedPrompt.empty(runner, prompt, len(prompt) + answer_tokens)
        try:
            return (yield from attempt.run(fused, refused, started, decision))
        except LateMissError as late:
            for start in late.corrupt:
                runner.store.discard(fused.entry_keys[start], late.misses[start].reason)
            refused |= {lookup.start: Miss(lookup.reason or "absent") for lookup in fused.lookups if not lookup.hit}
            refused |= late.misses
        finally:
            fused.stop()
        del fused  # free its buffer before the next one is allocated


def check_window(lm: LanguageModel, prompt: Prompt, answer_tokens: int) -> None:
    """Check that a prompt and its answer fit the model's context window.

    Raises:
        PromptTooLong: if they do not.
    """
    if len(prompt) + answer_tokens > lm.context_window.tokens:
        raise PromptTooLong(
            f"{len(prompt):,} prompt tokens and {answer_tokens:,} for the answer exceed the context window of "
            f"{lm.context_window.tokens:,} ({lm.context_window.reason}); retrieve fewer passages or generate less"
        )


@dataclass(frozen=True, slots=True)
class GuardDecision:
    """The answer of a method's guard.

    Attributes:
        refusal: why nothing is fused, or None.
        predicted_s: seconds to the first token that are predicted for what is done; None if no guard was asked.
    """

    refusal: str | None = None
    predicted_s: float | None = None


def _ask_guard(
    runner: ModelRunner, prompt: Prompt, method: Method, wait_budget: WaitBudget, start: int
) -> GuardDecision:
    """Ask the method's guard, if there is one, whether to fuse what comes from `start` on."""
    if method.guard is None or method.base is None:
        return GuardDecision()
    try:
        estimate = wait_budget.call(lambda: estimate_prefill(runner.lm, runner.store, prompt, method, start))
        # With no passage stored, fusing is full prefill that also reports the misses.
        if not estimate.stored_tokens or 0 < estimate.passages == estimate.absent:
            return GuardDecision()
        costs = runner.costs(wait_budget.left_s)
    except TimeoutError as error:
        return GuardDecision(f"everything is computed: the store gave {error}")
    except Exception as error:  # such as no memory for a measured pass; the prompt is fused without a guard
        LOG.warning("the guard is not asked: %s: %s", type(error).__name__, error)
        return GuardDecision()
    refusal = method.guard.refusal(estimate, costs)
    if refusal is None:
        return GuardDecision(None, predict_fused_s(estimate, costs))
    if method.guard.refusal(estimate.all_near, costs) is None and _copy_near(runner, estimate):
        refusal = f"{refusal}; the passages that are not in memory are being copied there"
    if estimate.absent:
        refusal = f"{refusal}; {estimate.absent} of {estimate.passages} passages are absent"
    return GuardDecision(refusal, costs.full_pass_s(estimate.prompt_tokens, estimate.held_tokens))


def _copy_near(runner: ModelRunner, estimate: PrefillEstimate) -> bool:
    """Start to copy stored segments to the nearest tier, for later prompts; return whether there are any that fit."""
    limit_bytes, nbytes = runner.store.tiers[0].limit_bytes, estimate.stored_tokens * runner.lm.kv_bytes_per_token
    if not estimate.far_keys or (limit_bytes is not None and nbytes > limit_bytes):
        return False
    try:
        runner.store.prefetch(estimate.far_keys)
    except Exception as error:  # no store may fail a request for the sake of later ones
        LOG.warning("passages are not copied to memory: %s: %s", type(error).__name__, error)
        return False
    return True


@dataclass(frozen=True, slots=True, eq=False)
class PrefillAttempt:
    """One attempt to fuse a prompt; it is repeated without the chunks that turn out to be unreadable.

    Attributes:
        runner: the model and the store.
        method: what to reuse and what to recompute.
        lease: the beginning that earlier requests have computed, or None.
        part_rows: the most rows of a part, or None.
        wait_budget: how long to wait for the store.
    """

    runner: ModelRunner
    method: Method
    lease: PrefixLease | None
    part_rows: PartRows | None
    wait_budget: WaitBudget

    def run(
        self, fused: FusedPrompt, refused: Mapping[int, Miss], started: float, decision: GuardDecision
    ) -> Parts[Prefilled]:
        """Fuse, in parts.

        Args:
            fused: the prompt with nothing placed.
            refused: chunks not to look up, by their positions, and why.
            started: `time.perf_counter()` when the request began.
            decision: the answer of the method's guard, for the report.

        Raises:
            LateMissError: if chunks that were found cannot be read while the pass runs.
        """
        method = self.method
        self._load(fused, refused)
        candidates = recomputable_chunks(fused)
        candidate_tokens = sum(len(placed.span) for placed in candidates)
        budget = candidate_tokens if method.budget is None else method.budget.tokens(candidate_tokens)

        marks = [_Mark.now(fused)]
        scores = method.probe.scores(fused) if method.probe is not None and budget else None
        marks.append(_Mark.now(fused))
        selection = method.selector.select(candidates, scores, budget) if budget else Selection.none()
        selection = selection.to(fused.lm.device)
        marks.append(_Mark.now(fused))
        hook: LayerHook | None = None
        if len(selection.positions):
            if selection.until is not None:
                hook = NestedRows(selection.positions, selection.until)
            elif method.layer_hook is not None:
                hook = method.layer_hook.make_hook(fused, candidates, selection, scores, budget)
        if method.residuals is not None and hook is None:
            fused.spread_residuals(method.residuals, candidates, selection.positions)
        logits, recomputed = yield from recompute(fused, candidates, selection, hook, method.context, self.part_rows)
        fused.stop_spreading()
        marks.append(_Mark.now(fused))
        marks[-1].time.wait()
        total_s = time.perf_counter() - started
        probe_s, select_s, recompute_s = (_computing_s(first, last, fused) for first, last in pairwise(marks))
        stages = probe_s, select_s, recompute_s - fused.others_s, fused.others_s

        positions: list[int] = recomputed.tolist()  # once: every copy from the device makes the host wait
        limit = None if selection.until is not None or method.layer_hook is not None else budget
        try:
            check_selection(positions, candidates, fused.known, limit)
        except ValueError as error:
            raise ValueError(f"method {method.name!r} {error}") from None
        report = _report(fused, method, positions, Timings(total_s - sum(stages), *stages), decision)
        exact_tokens = _exact_tokens(fused, positions if hook is None else [])
        return Prefilled(fused.prompt, logits, fused.await_all(), report, scores, exact_tokens, self.lease)

    def _load(self, fused: FusedPrompt, refused: Mapping[int, Miss]) -> None:
        if self.lease is not None:
            self.lease.give(fused)
        if self.method.base is None:
            return
        fused.load(
            self.method.base,
            self.method.adapter,
            start=0 if self.lease is None else self.lease.held,
            wait_budget=self.wait_budget,
            refused=refused,
        )
        if refused:
            fused.await_all()  # after one unreadable chunk nothing is computed before everything is there


def _exact_tokens(fused: FusedPrompt, recomputed: Collection[int]) -> int:
    """Return the first position whose keys and values are not full prefill's; the prompt's length if there is none.

    A chunk counts as exact only as it was stored, and not from a quantized store.

    Args:
        fused: the prompt with its rows computed.
        recomputed: reused positions that were recomputed in all layers.
    """
    if fused.prefix_exact < fused.prefix_tokens:
        return fused.prefix_exact
    altered = {lookup.start for lookup in fused.lookups if lookup.note is not None}
    recomputed = frozenset(recomputed)
    for placed in sorted(fused.placed, key=lambda placed: placed.span.start):
        span = placed.span
        if placed.exact and placed.chunk.numbers == LOSSLESS and span.start not in altered:
            continue
        stale = next((position for position in range(span.start, span.stop) if position not in recomputed), None)
        if stale is not None:
            return stale
    return len(fused.prompt)


def _report(
    fused: FusedPrompt,
    method: Method,
    recomputed: list[int],
    timings: Timings,
    decision: GuardDecision,
) -> FusionReport:
    prompt, unstored, recomputed_tokens = fused.prompt, int((~fused.known).sum()), len(recomputed)
    candidate_tokens = sum(len(placed.span) for placed in recomputable_chunks(fused))
    return FusionReport(
        method=method.name,
        base=method.base.name if method.base else None,
        ratio=recomputed_tokens / max(1, candidate_tokens) if method.ratio is None else method.ratio,
        prompt_tokens=len(prompt),
        context_tokens=sum(len(span) for span in prompt.chunks),
        reused_tokens=len(prompt) - unstored - recomputed_tokens,
        prefix_tokens=fused.prefix_tokens,
        rows=unstored + recomputed_tokens,
        selected=tuple(recomputed),
        row_layers=fused.row_layers,
        n_layers=fused.lm.n_layers,
        lookups=tuple(fused.lookups),
        bytes_loaded=fused.bytes_loaded,
        timings=timings,
        fallback=decision.refusal
        or describe_misses(fused.lookups)
        or (prompt.note if method.base is not None else None),
        predicted_s=decision.predicted_s,
    )


@dataclass(frozen=True, slots=True)
class _Mark:
    """A moment between two stages, and the number of waits for the store before it."""

    time: DeviceTimestamp
    waits: int

    @classmethod
    def now(cls, fused: FusedPrompt) -> _Mark:
        return cls(DeviceTimestamp.on(fused.lm.device), len(fused.waits))


def _computing_s(first: _Mark, last: _Mark, fused: FusedPrompt) -> float:
    """Return the seconds between two marks, without those of waiting for the store."""
    waited = sum(began.seconds_until(ended) for began, ended in fused.waits[first.waits : last.waits])
    return first.time.seconds_until(last.time) - waited
