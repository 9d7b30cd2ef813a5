"""Time to first token and decode rate over context lengths, ratios and tiers, all sides in turns in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from qcfuse_rag.engine.exactness_check import stock_attention
from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.evaluation.quality.configurations import Configuration, configurations
from qcfuse_rag.evaluation.speed.ceilings import add_floors, measure_ceilings, row_operations, seconds
from qcfuse_rag.evaluation.speed.decoding import STEPS, decode_steps
from qcfuse_rag.evaluation.speed.tiers import StoreTier, check_tiers, fill, open_tiers
from qcfuse_rag.fusion.pipeline import prefill
from qcfuse_rag.prompts.segments import Prompt, Role, Segment
from qcfuse_rag.runtime.graphs.decode_graphs import DecodeRunner
from qcfuse_rag.runtime.graphs.prefill_graphs import PrefillRunner
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.loading.loading import Loading
from qcfuse_rag.store.quantization import LOSSLESS

PREFIX_TOKENS, QUESTION_TOKENS = 32, 32
FULL = configurations(())[0]


@dataclass(frozen=True, slots=True)
class SpeedOptions:
    """What to measure.

    Attributes:
        contexts: tokens of passages in a prompt.
        methods: beside full prefill.
        tiers: where passages come from: `memory` of the host, `pinned` memory of the host, memory of the `device`, the
            `disk` (its files in the page cache), or `throttled` to `throttle` bytes a second.
        numbers: formats that each tier keeps passages in, see `store.quantization`.
        chunk: tokens of a passage.
        repeats: rounds, after one that warms up.
        requests: sizes of the batches to decode.
        throttle: bytes a second.
        folder: of the disk to measure; that of temporary files if None.

    Raises:
        ValueError: if a number is too small.
    """

    contexts: tuple[int, ...] = (4096,)
    methods: tuple[Configuration, ...] = ()
    tiers: tuple[str, ...] = ("memory",)
    numbers: tuple[str, ...] = (LOSSLESS,)
    chunk: int = 512
    repeats: int = 5
    requests: tuple[int, ...] = (1, 4, 8)
    throttle: float = 1e9
    folder: Path | None = None

    def __post_init__(self) -> None:
        numbers = (*self.contexts, *self.requests, self.chunk, self.repeats)
        if min(numbers) < 1 or not self.throttle > 0:
            raise ValueError("contexts, requests, chunk, repeats and throttle must be more than 0")


@torch.inference_mode()
def measure_speed(
    lm: LanguageModel,
    options: SpeedOptions,
    progress: Callable[[int, int], None] | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measure and return plain data.

    Passages are random tokens: what is computed and moved depends on their number alone.

    Args:
        lm: the model.
        options: what to measure.
        progress: called with contexts `(done, total)`.
        keep: called with the result so far after each context.

    Raises:
        QCFuseError: if there is no such tier here, or no such format of numbers.
        PromptTooLong: if a context exceeds the model's window.
    """
    check_tiers(lm, options.tiers, options.numbers)
    ceilings = measure_ceilings(lm)
    result: dict[str, Any] = {
        "kv_bytes_per_token": lm.kv_bytes_per_token,
        "prefill": [],
        "decode": [],
    }
    generator = torch.Generator().manual_seed(0)
    passes, step = PrefillRunner(lm), DecodeRunner(lm)
    result["recording_s"] = seconds(lm, passes.compile)
    result["recording_refusal"] = passes.refusal
    if options.requests:
        result["step_recording_s"] = seconds(lm, lambda: step.compile(options.requests))
        result["step_recording_refusal"] = step.refusal
        result["step_s_by_view"] = step.seconds
    with ExitStack() as stack:
        tiers = open_tiers(lm, options.tiers, options.numbers, stack, throttle=options.throttle, folder=options.folder)
        for done, context in enumerate(options.contexts):
            prompt = random_prompt(lm, context, options.chunk, generator)
            fill(lm, [tier.store for tier in tiers], prompt, [one.method for one in options.methods])
            result["prefill"] += _prefills(lm, passes, tiers, prompt, options)
            method = options.methods[0].method if options.methods else FULL.method
            prefilled = prefill(lm, tiers[0].store, prompt, method, room=STEPS)
            result["decode"] += decode_steps(lm, step, prefilled, options.requests)
            del prefilled  # before there is another
            ceilings = ceilings.or_better(measure_ceilings(lm))
            add_floors(result, ceilings, options.throttle)
            if keep is not None:
                keep(result)
            if progress is not None:
                progress(done + 1, len(options.contexts))
    return result


def random_prompt(lm: LanguageModel, context: int, chunk: int, generator: torch.Generator) -> Prompt:
    """Return a prompt of random tokens: a head, passages of `chunk` tokens that add up to `context`, a question.

    Raises:
        PromptTooLong: if it exceeds the model's window.
    """
    vocabulary = lm.model.get_input_embeddings().num_embeddings
    sizes = [min(chunk, context - start) for start in range(0, context, chunk)]
    lengths = [PREFIX_TOKENS, *sizes, QUESTION_TOKENS]
    if sum(lengths) + STEPS > lm.window.tokens:
        raise PromptTooLong(f"a context of {context:,} tokens exceeds the model's window of {lm.window.tokens:,}")
    drawn = [tuple(torch.randint(vocabulary, (n,), generator=generator).tolist()) for n in lengths]
    roles = [Role.HEAD, *(Role.CHUNK for _ in sizes), Role.QUESTION]
    segments = tuple(Segment(role, ids, "") for role, ids in zip(roles, drawn, strict=True))
    return Prompt(segments, prefix_ids=drawn[0])


def _prefills(
    lm: LanguageModel,
    passes: PrefillRunner,
    tiers: Sequence[StoreTier],
    prompt: Prompt,
    options: SpeedOptions,
) -> list[dict[str, Any]]:
    """Time every side in turns; the first turn warms up."""
    ids = torch.tensor([prompt.ids], device=lm.device)

    def stock() -> None:
        lm.model.generate(ids, max_new_tokens=1, do_sample=False, attention_mask=torch.ones_like(ids))

    sides = [(StoreTier("-", LOSSLESS, tiers[0].store), FULL)]
    sides += [(tier, one) for tier in tiers for one in options.methods]
    times: list[list[float]] = [[] for _ in sides]
    loading, counted = Loading(lm), Loading(lm, spare_bytes=0)  # torch counts what it allocates itself
    reports, replayed = [], [passes.replayed]
    for tier, one in sides:
        reports.append(prefill(lm, tier.store, prompt, one.method, loading=loading, passes=passes).report)
        replayed.append(passes.replayed)
    stages: list[list[dict[str, float]]] = [[] for _ in sides]
    transformers: list[float] = []
    for turn in range(options.repeats + 1):
        with stock_attention(lm):
            taken = seconds(lm, stock)
        if turn:
            transformers.append(taken)
        for side, (tier, one) in enumerate(sides):
            timings = prefill(lm, tier.store, prompt, one.method, loading=loading, passes=passes).report.timings
            if turn:
                times[side].append(timings.ttft_s)
                stages[side].append(
                    {"load": timings.load_s, "probe": timings.probe_s, "recompute": timings.recompute_s}
                )
    full = median(times[0])
    rows = []
    recorded_passes = [after - before for before, after in pairwise(replayed)]
    for (tier, one), own, report, staged, recorded in zip(sides, times, reports, stages, recorded_passes, strict=True):
        again = partial(prefill, lm, tier.store, prompt, one.method, loading=counted, passes=passes)
        ttft = median(own)
        rows.append(
            {
                "context": sum(len(span) for span in prompt.chunks),
                "prompt": len(prompt),
                "method": one.label,
                "ratio": one.ratio,
                "tier": tier.name,
                "numbers": tier.numbers,
                "rows": report.rows,
                "recorded_passes": recorded,
                "ttft_s": ttft,
                "spread_s": max(own) - min(own),
                "full_s": full,
                "transformers_s": median(transformers),
                "speedup": full / ttft,
                "speedup_transformers": median(transformers) / ttft,
                "operations": row_operations(lm, report.row_layers / lm.n_layers, len(prompt)),
                "bytes_loaded": report.bytes_loaded,
                "stages_s": {name: median(turn[name] for turn in staged) for name in staged[0]},
                "peak_bytes": peak_bytes(lm.device, again),
                "buffer_bytes": len(prompt) * lm.kv_bytes_per_token,
            }
        )
    return rows


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Run and return the most bytes of tensors in use at once, less those before, as torch's allocator counts them."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        held = run()  # what it returns counts, and is let go of after the last event
    del held
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())), default=0)
