"""Fused prefill: place what is stored, probe, select, recompute, and arrive at the first token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.fusion.estimate import estimate_prefill
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.recompute import Pause, recompute
from qcfuse_rag.fusion.report import FusionReport, Timings, describe_misses
from qcfuse_rag.fusion.selectors import Selection, recomputable_chunks
from qcfuse_rag.fusion.shared_prefix import SharedPrefix
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.attention.scores import Scores
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.costs import Costs
from qcfuse_rag.runtime.graphs.prefill_graphs import PrefillRunner
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.layer_hooks import LayerHook, NestedRows
from qcfuse_rag.runtime.loading.device_timer import DeviceTimestamp
from qcfuse_rag.runtime.loading.layer_loader import LateMissError, Wait
from qcfuse_rag.runtime.loading.loading import Loading
from qcfuse_rag.runtime.loading.wait_budget import WaitBudget, call_with_timeout
from qcfuse_rag.store.backends.base import KVStore, Miss


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """A prompt ready to be continued.

    Attributes:
        prompt: what was brought to its first token.
        logits: `[vocabulary]` float32, scores of the first new token.
        buffer: keys and values of the whole prompt, with room for the answer.
        report: what was done.
        scores: what the probe found, if there was one.
    """

    prompt: Prompt
    logits: Tensor
    buffer: KVBuffer
    report: FusionReport
    scores: Scores | None = None


@torch.inference_mode()
def prefill(
    lm: LanguageModel,
    store: KVStore,
    prompt: Prompt,
    method: Method,
    *,
    room: int = 0,
    shared: SharedPrefix | None = None,
    costs: Callable[[], Costs] | None = None,
    loading: Loading | None = None,
    pause: Pause | None = None,
    passes: PrefillRunner | None = None,
) -> Prefilled:
    """Bring a prompt to its first token.

    Args:
        lm: the model.
        store: where chunks may be found; every failure to read one makes its tokens rows.
        prompt: the prompt.
        method: what to reuse and what to recompute.
        room: tokens to reserve for the answer.
        shared: the beginning that the prompt has in common with the one before, and what the next one wants of it.
        costs: what the method's guard decides by, asked for if it has to; None leaves the guard out.
        loading: how to go on loading while computing; None loads everything first, however long it takes.
        pause: when to let others compute; methods that steer a pass between layers have none.
        passes: of the model, recorded ones perhaps.

    Raises:
        PromptTooLong: if prompt and answer do not fit the model's context window.
        ValueError: if the method's selector does not keep to what it is asked for.
    """
    require_room(lm, prompt, room)
    begun = time.perf_counter()
    patience = WaitBudget(None if loading is None else loading.limit_s)
    refusal = None if costs is None else _refusal(lm, store, prompt, method, costs, patience)
    method = method if refusal is None else method.as_full_prefill
    refused: dict[int, Miss] = {}
    while True:  # each time around without another chunk at least
        pool = None if loading is None else loading.pool
        assembly = FusedPrompt.empty(lm, prompt, len(prompt) + room, pool, passes)
        try:
            return _attempt(
                assembly, store, method, shared or SharedPrefix(), begun, refusal, loading, patience, refused, pause
            )
        except LateMissError as late:  # found out while computing
            for start in late.corrupt:
                store.discard(assembly.keys[start], late.misses[start].reason)
            refused |= {one.start: Miss(one.reason or "absent") for one in assembly.lookups if not one.hit}
            refused |= late.misses
        finally:
            assembly.stop()
        del assembly  # before there is another


def _refusal(
    lm: LanguageModel, store: KVStore, prompt: Prompt, method: Method, costs: Callable[[], Costs], patience: WaitBudget
) -> str | None:
    """Return why a method's guard would rather compute everything; None if it would not, or there is none."""
    if method.guard is None or method.base is None:
        return None
    try:
        ahead = patience.call(lambda: estimate_prefill(lm, store, prompt, method))
        # Without any passage there is little to load: fusing is full prefill, and says what it did not find.
        if not ahead.stored_tokens or 0 < ahead.passages == ahead.absent:
            return None
        refusal = method.guard.refusal(ahead, call_with_timeout(patience.left_s, costs))
        if refusal is None or not ahead.absent:
            return refusal
        return f"{refusal}; {ahead.absent} of {ahead.passages} passages are absent"
    except TimeoutError as error:
        return f"everything is computed: the store gave {error}"


def _attempt(
    assembly: FusedPrompt,
    store: KVStore,
    method: Method,
    shared: SharedPrefix,
    begun: float,
    refusal: str | None,
    loading: Loading | None,
    patience: WaitBudget,
    refused: dict[int, Miss],
    pause: Pause | None,
) -> Prefilled:
    """Fuse; raises `LateMissError` if chunks that were found turn out not to be there while computing."""
    lm, prompt = assembly.lm, assembly.prompt
    shared.give(assembly)
    if method.base is not None:
        assembly.load(
            store,
            method.base,
            method.adapter,
            start=shared.held,
            loading=loading,
            patience=patience,
            refused=refused,
        )
        if refused and assembly.arrival is not None:
            assembly.arrival.wait()  # after one surprise nothing is computed before everything is there
        if shared.keep or shared.held:
            shared.take(assembly, assembly.known)
    candidates = recomputable_chunks(assembly)
    inexact_tokens = sum(len(placed.span) for placed in candidates)
    budget = inexact_tokens if method.budget is None else method.budget.tokens(inexact_tokens)

    started = _mark(assembly)
    scores = method.probe.scores(assembly) if method.probe is not None and budget else None
    probed = _mark(assembly)
    selection = method.selector.select(candidates, scores, budget) if budget else Selection.none()
    selection = selection.to(lm.device)
    chosen = _mark(assembly)
    steering: LayerHook | None = None
    if len(selection.positions):
        if selection.until is not None:
            steering = NestedRows(selection.positions, selection.until)
        elif method.layer_hook is not None:
            steering = method.layer_hook.steer(assembly, candidates, selection, scores, budget)
    logits, selected = recompute(assembly, candidates, selection, steering, method.context, pause)
    if method.base is None:
        shared.take(assembly, torch.ones_like(assembly.known))
    done = _mark(assembly)
    done[0].wait()
    total_s = time.perf_counter() - begun
    computed = [_computing_s(first, last, assembly.waits) for first, last in pairwise((started, probed, chosen, done))]

    positions, always = selected.tolist(), int((~assembly.known).sum())
    if len(set(positions)) < len(positions) or not bool(assembly.known[positions].all()):
        raise ValueError(f"method {method.name!r} selects a token twice, or one that is computed anyway")
    allowed = torch.zeros(len(prompt), dtype=torch.bool)
    for placed in candidates:
        allowed[placed.span.start : placed.span.stop] = True
    if not bool(allowed[positions].all()):
        raise ValueError(f"method {method.name!r} selects a token that is none of the candidates'")
    if selection.until is None and method.layer_hook is None and len(positions) > budget:
        raise ValueError(f"method {method.name!r} selects {len(positions):,} tokens, of which {budget:,} are allowed")
    report = FusionReport(
        method=method.name,
        base=method.base.name if method.base else None,
        ratio=len(selected) / max(1, inexact_tokens) if method.ratio is None else method.ratio,
        prompt_tokens=len(prompt),
        context_tokens=sum(len(span) for span in prompt.chunks),
        reused_tokens=len(prompt) - always - len(selected),
        rows=always + len(selected),
        selected=tuple(positions),
        row_layers=assembly.row_layers,
        n_layers=lm.n_layers,
        lookups=tuple(assembly.lookups),
        bytes_loaded=assembly.bytes_loaded,
        timings=Timings(total_s - sum(computed), *computed),
        fallback=refusal or describe_misses(assembly.lookups) or (prompt.note if method.base is not None else None),
    )
    return Prefilled(prompt, logits, assembly.buffer, report, scores)


def require_room(lm: LanguageModel, prompt: Prompt, room: int) -> None:
    """Check that a prompt and `room` tokens of an answer fit the model's context window.

    Raises:
        PromptTooLong: if they do not.
    """
    if len(prompt) + room > lm.window.tokens:
        raise PromptTooLong(
            f"{len(prompt):,} prompt tokens and {room:,} for the answer exceed the context window of "
            f"{lm.window.tokens:,} ({lm.window.reason}); retrieve fewer passages or generate less"
        )


def _mark(assembly: FusedPrompt) -> tuple[DeviceTimestamp, int]:
    """Return the present moment, and how many waits for the store lie before it."""
    return DeviceTimestamp.on(assembly.lm.device), len(assembly.waits)


def _computing_s(first: tuple[DeviceTimestamp, int], last: tuple[DeviceTimestamp, int], waits: Sequence[Wait]) -> float:
    """Return the seconds between two marks, without those of waiting."""
    waited = sum(began.until(ended) for began, ended in waits[first[1] : last[1]])
    return first[0].until(last[0]) - waited
