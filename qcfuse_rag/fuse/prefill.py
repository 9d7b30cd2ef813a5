"""Fused prefill: place what is stored, probe, select, recompute, and arrive at the first token."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.fuse.assembly import Assembly
from qcfuse_rag.fuse.buffer import KVBuffer
from qcfuse_rag.fuse.forward import forward_rows
from qcfuse_rag.fuse.method import Method
from qcfuse_rag.fuse.rows import RowsPlan
from qcfuse_rag.fuse.select import inexact_chunks
from qcfuse_rag.model.language_model import LanguageModel
from qcfuse_rag.prompt.segments import Prompt
from qcfuse_rag.report.fusion import FusionReport, Timings, describe_misses
from qcfuse_rag.store.contract import KVStore


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """A prompt ready to be continued.

    Attributes:
        logits: `[vocabulary]` float32, scores of the first new token.
        buffer: keys and values of the whole prompt, with room for the answer.
        report: what was done.
    """

    logits: Tensor
    buffer: KVBuffer
    report: FusionReport


@torch.inference_mode()
def prefill(lm: LanguageModel, store: KVStore, prompt: Prompt, method: Method, *, room: int = 0) -> Prefilled:
    """Bring a prompt to its first token.

    Args:
        lm: the model.
        store: where chunks may be found; every failure to read one makes its tokens rows.
        prompt: the prompt.
        method: what to reuse and what to recompute.
        room: tokens to reserve for the answer.

    Raises:
        PromptTooLong: if prompt and answer do not fit the model's context window.
    """
    total = len(prompt) + room
    if total > lm.window.tokens:
        raise PromptTooLong(
            f"{len(prompt):,} prompt tokens and {room:,} for the answer exceed the context window of "
            f"{lm.window.tokens:,} ({lm.window.reason}); retrieve fewer passages or generate less"
        )
    begun = time.perf_counter()
    if method.base is None:
        assembly = Assembly.empty(lm, prompt, total)
    else:
        assembly = Assembly.from_store(lm, store, prompt, method.base, total)
    _synchronize(lm)
    candidates = inexact_chunks(assembly)
    inexact_tokens = sum(len(placed.span) for placed in candidates)
    budget = inexact_tokens if method.budget is None else method.budget.tokens(inexact_tokens)

    started = time.perf_counter()
    scores = method.probe.scores(assembly) if method.probe is not None and budget else None
    _synchronize(lm)
    probed = time.perf_counter()
    is_row = ~assembly.known
    selected = (
        method.selector.select(candidates, scores, budget).to(lm.device) if budget else is_row[:0].nonzero()[:, 0]
    )
    is_row[selected] = True
    rows = is_row.nonzero()[:, 0]
    chosen = time.perf_counter()
    logits = forward_rows(lm, assembly.ids[rows], RowsPlan.of(rows, lm.sliding), assembly.buffer)
    _synchronize(lm)
    done = time.perf_counter()

    report = FusionReport(
        method=method.name,
        base=method.base.name if method.base else None,
        ratio=len(selected) / max(1, inexact_tokens) if method.ratio is None else method.ratio,
        prompt_tokens=len(prompt),
        context_tokens=sum(len(span) for span in prompt.chunks),
        reused_tokens=len(prompt) - len(rows),
        rows=len(rows),
        selected=tuple(selected.tolist()),
        lookups=tuple(assembly.lookups),
        bytes_loaded=assembly.bytes_loaded,
        timings=Timings(started - begun, probed - started, chosen - probed, done - chosen),
        fallback=describe_misses(assembly.lookups),
    )
    return Prefilled(logits, assembly.buffer, report)


def _synchronize(lm: LanguageModel) -> None:
    """Wait for the device, so that a stage's time is its own."""
    if lm.device.type == "cuda":
        torch.cuda.synchronize(lm.device)
