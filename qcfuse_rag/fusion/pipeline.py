"""Fused prefill: place the stored chunks, probe, select, recompute in one pass or in parts, arrive at a first token."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.fusion.lookup import LookupPlan, Lookups, plan_lookups
from qcfuse_rag.fusion.method import Method, PassStart
from qcfuse_rag.fusion.prefix_cache import PrefixLease
from qcfuse_rag.fusion.report import FusionReport, Timings, describe_limit, describe_misses
from qcfuse_rag.fusion.selectors import Selection, check_selection, recomputable_chunks
from qcfuse_rag.fusion.state import FusedPrompt, PlacedChunk
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.attention.scores import Scores
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.cost import PrefillEstimate
from qcfuse_rag.runtime.device import DeviceTimestamp
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.layer_hooks import HookedPass, LayerHook
from qcfuse_rag.runtime.loading.layer_loader import WaitBudget
from qcfuse_rag.runtime.loading.sources import LateMissError
from qcfuse_rag.runtime.residuals import ResidualKernel, ResidualSpread
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.quantization import LOSSLESS

LOG = logging.getLogger(__name__)

T = TypeVar("T")

Parts = Generator[int, None, T]
"""Work in parts: yields the number of rows left before each part, and returns the result. Work that fits one part
yields nothing."""

PartRows = Callable[[], int]
"""Returns the most rows of the next part, at least 1."""


def complete(parts: Parts[T]) -> T:
    """Do all parts one after the other; return the result."""
    while True:
        try:
            next(parts)
        except StopIteration as finished:
            result: T = finished.value
            return result


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """A prompt ready to be continued.

    Attributes:
        logits: `[vocabulary]` float32, scores of the first new token.
        buffer: keys and values of the whole prompt, with capacity for the answer.
        exact_tokens: number of leading positions whose keys and values are full prefill's; the whole prompt if
            everything was computed. Recomputed positions behind stale ones do not count.
        lease: caches prompt and answer for later prompts that begin with them; None if they are not cached.
    """

    prompt: Prompt
    logits: Tensor
    buffer: KVBuffer
    report: FusionReport
    scores: Scores | None = None
    exact_tokens: int = 0
    lease: PrefixLease | None = None


def fuse_prompt(runner: ModelRunner, prompt: Prompt, method: Method, *, answer_tokens: int = 0) -> Prefilled:
    """Bring a prompt to its first token; see `fuse_in_parts`.

    Raises:
        PromptTooLong: if the prompt does not fit the model's context window.
        ValueError: if the method's selector breaks its contract.
    """
    return complete(fuse_in_parts(runner, prompt, method, answer_tokens=answer_tokens))


@torch.inference_mode()
def fuse_in_parts(
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
        prompt: what to compute.
        method: what to reuse and what to recompute.
        answer_tokens: tokens to reserve for the answer, as many as fit; the report says if fewer do.
        lease: the beginning that earlier requests have computed; None for nothing.
        part_rows: the most rows of a part; None for one part. A method with a layer hook computes its rows in one part.

    Raises:
        PromptTooLong: if the prompt does not fit the model's context window.
        ValueError: if the method's selector breaks its contract.
    """
    room = answer_room(runner.lm, prompt, answer_tokens)
    started = time.perf_counter()
    wait_budget = WaitBudget(runner.load_limit_s)
    try:
        plan, refusal, predicted_s = _decide(runner, prompt, method, wait_budget, 0 if lease is None else lease.held)
        if plan is None and lease is not None:
            lease.held = min(lease.held, lease.exact_tokens)  # full prefill is exact
        lookups = None if plan is None else Lookups(plan, wait_budget)
        method = method.as_full_prefill if plan is None else method
        retried = False
        while True:  # every turn does without at least one entry more
            fused = FusedPrompt.empty(runner, prompt, len(prompt) + room)
            try:
                if lease is not None:
                    lease.give(fused)
                if lookups is not None:
                    fused.load(lookups.outcomes(), wait_budget)
                if retried:  # compute nothing before everything is loaded, since a chunk was unreadable
                    fused.await_all()
                prefilled = yield from _fuse(fused, method, part_rows, started)
                if not retried and method.layer_hook is None:
                    _learn(fused, prefilled.report, None if plan is None else plan.estimate)
                limit = None if room == answer_tokens else describe_limit(room, answer_tokens)
                fallback = refusal or prefilled.report.fallback
                report = replace(prefilled.report, fallback=fallback, predicted_s=predicted_s, answer_limit=limit)
                return replace(prefilled, report=report, lease=lease)
            except LateMissError as late:
                assert lookups is not None
                lookups.reject(late)
                retried = True
            finally:
                fused.stop()
            del fused  # free its buffer before the next one is allocated
    finally:
        wait_budget.close()


def answer_room(lm: LanguageModel, prompt: Prompt, answer_tokens: int) -> int:
    """Return how many of so many tokens fit behind a prompt in the model's context window.

    Raises:
        PromptTooLong: if not even one does.
    """
    room = lm.context_window.tokens - len(prompt)
    if room < min(answer_tokens, 1):
        raise PromptTooLong(
            f"a prompt of {len(prompt):,} tokens with an answer exceeds the context window of "
            f"{lm.context_window.tokens:,} tokens ({lm.context_window.reason}); retrieve fewer passages, or leave out "
            "earlier turns"
        )
    return min(room, answer_tokens)


def _decide(
    runner: ModelRunner, prompt: Prompt, method: Method, wait_budget: WaitBudget, start: int
) -> tuple[LookupPlan | None, str | None, float | None]:
    """Plan what to read from `start` on, and ask the method's guard; without a plan, everything is computed.

    Also returns why nothing is fused, and the seconds to the first token that are predicted for what is done.
    """
    if method.base is None:
        return None, None, None
    priced = method.guard is not None
    make_plan = partial(plan_lookups, runner.lm, runner.store, prompt, method, start, priced=priced)
    try:
        plan = wait_budget.call(make_plan)
    except TimeoutError as error:
        return None, f"everything is computed: the store gave {error}", None
    estimate = plan.estimate
    # With no passage stored, fusing is full prefill that also reports the misses.
    if method.guard is None or not estimate.stored_tokens or 0 < estimate.passages == estimate.absent:
        return plan, None, None
    costs = runner.costs()
    if costs is None:  # nothing was computed yet
        return plan, None, None
    refusal = method.guard.refusal(estimate, costs)
    if refusal is None:
        runner.costs.refusals = 0
        return plan, None, costs.fused_s(estimate)
    full_s = costs.full_pass_s(estimate.prompt_tokens, estimate.held_tokens)
    hopeful = replace(costs, load_s=0.0, near_load_s=0.0, scan_s=0.0)  # only fusing tells if these still hold
    if method.guard.refusal(estimate, hopeful) is None and runner.costs.tries_again():
        wait_budget.lower(full_s)  # should the refusal be right, little is lost
        return plan, None, costs.fused_s(estimate)
    reasons = [refusal]
    if method.guard.refusal(estimate.all_near, costs) is None and _copy_near(runner, plan):
        reasons.append("the passages that are not in memory are being copied there")
    if estimate.absent:
        reasons.append(f"{estimate.absent} of {estimate.passages} passages are absent")
    return None, "; ".join(reasons), full_s


def _learn(fused: FusedPrompt, report: FusionReport, estimate: PrefillEstimate | None) -> None:
    """Have the costs learn from a prefill without a layer hook, if it has computed the rows that were estimated."""
    if estimate is None:
        held = fused.prefix_tokens
        estimate = PrefillEstimate(report.prompt_tokens - held, 0, 0, 0, 1.0, held_tokens=held)
    if report.rows == estimate.rows:
        probe_rows = (report.row_layers / report.n_layers - report.rows) / estimate.probe_share
        stages = {name: getattr(report.timings, name) for name in ("load_s", "probe_s", "recompute_s")}
        estimate = replace(estimate, probe_rows=round(probe_rows))
        fused.runner.costs.observe_prefill(estimate, **stages, parts=fused.parts or 1)


def _copy_near(runner: ModelRunner, plan: LookupPlan) -> bool:
    """Start to copy stored segments to the nearest tier, for later prompts; return whether there are any that fit."""
    limit_bytes, far_keys = runner.store.tiers[0].limit_bytes, plan.far_keys
    nbytes = plan.estimate.stored_tokens * runner.lm.kv_bytes_per_token
    if not far_keys or (limit_bytes is not None and nbytes > limit_bytes):
        return False
    try:
        runner.store.prefetch(far_keys)
    except Exception as error:  # no store may fail a request for the sake of later ones
        LOG.warning("passages are not copied to memory: %s: %s", type(error).__name__, error)
        return False
    return True


def _fuse(fused: FusedPrompt, method: Method, part_rows: PartRows | None, started: float) -> Parts[Prefilled]:
    """Probe, select and recompute over chunks that are being loaded; `started` is when the request began.

    Raises:
        LateMissError: if chunks that were found cannot be read while the pass runs.
    """
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
    if len(selection.positions) and method.layer_hook is not None:
        hook = method.layer_hook.make_hook(PassStart(fused, candidates, selection, scores, budget))
    if method.residuals is not None and hook is None:
        fused.residuals = _residuals(fused, method.residuals, candidates, selection.positions)
    logits, recomputed = yield from recompute(fused, selection, hook, part_rows)
    fused.residuals = None
    marks.append(_Mark.now(fused))
    marks[-1].time.wait()
    total_s = time.perf_counter() - started
    probe_s, select_s, recompute_s = (_computing_s(first, last, fused) for first, last in pairwise(marks))
    stages = probe_s, select_s, recompute_s - fused.others_s, fused.others_s

    positions: list[int] = recomputed.tolist()  # once: every copy from the device makes the host wait
    limit = None if method.layer_hook is not None else budget
    try:
        check_selection(positions, candidates, fused.known, limit)
    except ValueError as error:
        raise ValueError(f"method {method.name!r} {error}") from None
    timings = Timings(total_s - sum(stages), *stages)
    report = _report(fused, method, positions, candidate_tokens, timings)
    exact_tokens = _exact_tokens(fused, positions if hook is None else [])
    return Prefilled(fused.prompt, logits, fused.await_all(), report, scores, exact_tokens)


def recompute(
    fused: FusedPrompt,
    selection: Selection,
    hook: LayerHook | None,
    part_rows: PartRows | None,
) -> Parts[tuple[Tensor, Tensor]]:
    """Compute the rows; return the first token's logits and the reused positions that were recomputed.

    If a hook drops rows between layers, the positions are those kept to the last layer; a hook may name them itself.
    """
    lm, selected = fused.lm, selection.positions
    unknown = (~fused.known).nonzero()[:, 0]  # includes the prompt's last position
    plan = RowsPlan.of(unknown, lm.sliding, device=lm.device)
    if len(selected):
        # Their number is known on the host, which need not wait for the positions.
        plan = RowsPlan(torch.cat([plan.rows, selected]).sort().values, plan.length, windows=lm.sliding)
    if part_rows is not None and hook is None:
        plan = yield from _all_but_last_part(fused, plan, part_rows)
    # A layer hook reads stored layers between the layers of the pass, so all of them have to be there first.
    buffer = fused.loading_buffer if hook is None else fused.await_all()
    hooked_pass = None if hook is None else HookedPass(plan, hook, buffer)
    logits = fused.runner.prefills.logits(fused.ids[plan.rows], plan, buffer, hooked_pass)
    fused.row_layers += len(plan.rows) * lm.n_layers if hooked_pass is None else hooked_pass.row_layers
    if hooked_pass is not None:
        selected = selected[torch.isin(selected, hooked_pass.chosen)]
    return logits, selected


def _all_but_last_part(fused: FusedPrompt, plan: RowsPlan, part_rows: PartRows) -> Parts[RowsPlan]:
    """Compute all rows but the last part; return the plan of the last part.

    A row sees no later row, so parts in order give the same result as one pass. The last part may be half as long
    again: an additional short pass would cost more than the longer part delays other requests.
    """
    lm, rows = fused.lm, plan.rows if plan.on_host is None else plan.on_host
    if 2 * len(rows) <= 3 * part_rows():
        return plan
    while 2 * len(rows) > 3 * part_rows():
        yield from _let_others_run(fused, len(rows))
        count = min(part_rows(), len(rows) - 1)
        part, rows = RowsPlan.of(rows[:count], lm.sliding, device=lm.device), rows[count:]
        fused.runner.prefills.hidden(fused.ids[part.rows], part, fused.loading_buffer, depth=lm.n_layers)
        fused.row_layers += len(part.rows) * lm.n_layers
        DeviceTimestamp.on(lm.device).wait()  # so that a cancelled request has no launched work left
    yield from _let_others_run(fused, len(rows))
    return RowsPlan.of(rows, lm.sliding, device=lm.device)


def _let_others_run(fused: FusedPrompt, rows_left: int) -> Parts[None]:
    """Yield the number of rows left, and note how long other requests ran."""
    began = time.perf_counter()
    fused.parts += 1
    yield rows_left
    fused.others_s += time.perf_counter() - began


def _residuals(
    fused: FusedPrompt, kernel: ResidualKernel, candidates: Sequence[PlacedChunk], selected: Tensor
) -> ResidualSpread | None:
    """Return the correction of passage tokens that are not selected; None on a GPU, whose passes are recorded."""
    if fused.lm.device.type != "cpu" or not len(selected):
        return None
    passages = [(placed.span.start, placed.span.stop) for placed in candidates]
    return ResidualSpread(kernel, fused.lm.ropes, passages, selected)


def _exact_tokens(fused: FusedPrompt, recomputed: Collection[int]) -> int:
    """Return the first position whose keys and values are not full prefill's; the prompt's length if there is none.

    A chunk counts as exact only as it was stored, and not from a quantized store.
    """
    if fused.prefix_exact < fused.prefix_tokens:
        return fused.prefix_exact
    altered = {lookup.start for lookup in fused.lookups if lookup.note is not None}
    recomputed = frozenset(recomputed)
    for placed in sorted(fused.placed, key=lambda placed: placed.span.start):
        span = placed.span
        if placed.exact and placed.chunk.kv_dtype == LOSSLESS and span.start not in altered:
            continue
        stale = next((position for position in range(span.start, span.stop) if position not in recomputed), None)
        if stale is not None:
            return stale
    return len(fused.prompt)


def _report(
    fused: FusedPrompt, method: Method, recomputed: list[int], candidate_tokens: int, timings: Timings
) -> FusionReport:
    prompt, unstored, recomputed_tokens = fused.prompt, int((~fused.known).sum()), len(recomputed)
    stored = [span for span in prompt.chunks if bool(fused.known[span.start])]
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
        fallback=describe_misses(fused.lookups) or (None if method.base is None else prompt.note),
        passages=len(prompt.passages),
        passages_reused=len({span.segment.ids_hash for span in stored}),
        stored_tokens=sum(map(len, stored)),
        unrecognised_tokens=0 if fused.prefix_tokens else prompt.unrecognised,
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
