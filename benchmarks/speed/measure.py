"""Time to first token and decode rate over context lengths, ratios and storage tiers.

All sides take turns in one process.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Cache, DynamicCache, StaticCache

from benchmarks.environment import about_run, require_json_name
from benchmarks.quality.configurations import Configuration, configurations
from benchmarks.speed.ceilings import (
    add_floors,
    row_operations,
    seconds,
    step_bytes,
    take_turns,
)
from benchmarks.speed.tables import draw, markdown
from benchmarks.speed.tiers import StoreTier, fill, open_tiers
from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.cli.capacity import measure_ceilings
from qcfuse_rag.engine.first_passes import measure_recorded_pass
from qcfuse_rag.errors import PromptTooLong, QCFuseError
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import Prefilled, fuse_prompt
from qcfuse_rag.fusion.report import FusionReport, Timings
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.segments import Prompt, Role, Segment
from qcfuse_rag.prompts.template import PromptTemplate
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.graphs.runners import DecodeRunner
from qcfuse_rag.runtime.kernels.support import unavailable_reason
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.quantization import LOSSLESS
from qcfuse_rag.verification.exactness import stock_attention

PREFIX_TOKENS, QUESTION_TOKENS = 32, 32
FULL_CONFIGURATION = configurations(())[0]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class SpeedOptions:
    """The options of `python -m benchmarks speed`; its help describes them.

    Passages come from the host's `memory`, `pinned` memory of the host, memory of the `device`, the `disk` (its files
    in the page cache), or are `throttled` to `throttle` bytes a second. If no tiers are given, `memory` and `disk` are
    measured, on a GPU `pinned`, `device` and `disk`. The warm-up round comes on top of `repeats`.
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
        counts = (*self.contexts, *self.requests, self.chunk, self.repeats)
        if min(counts) < 1 or not self.throttle > 0:
            raise ValueError("contexts, requests, chunk, repeats and throttle must be more than 0")


def run_speed(
    lm: LanguageModel, options: SpeedOptions, out: Path | None, progress: Progress | None = None
) -> dict[str, Any]:
    """Measure and return plain data; write `out` after each context, with Markdown and a picture beside it."""
    if out is not None:
        require_json_name(out)
    if not options.tiers:
        gpu = lm.device.type == "cuda"
        options = replace(options, tiers=("pinned", "device", "disk") if gpu else ("memory", "disk"))
    refusal = unavailable_reason(lm.device, lm.dtype, lm.widest_head)
    about = {**about_run(lm, lm.name), "kernels": refusal or "used"}

    def keep(measured: dict[str, Any]) -> None:
        if out is not None:
            result = {"about": about, **measured}
            write_atomically(out, json.dumps(result, indent=1))
            write_atomically(out.with_suffix(".md"), markdown(result))

    result = {"about": about, **measure_speed(lm, options, progress, keep)}
    if out is not None:
        try:
            draw(result, out.with_suffix(".png"))
        except QCFuseError as error:  # the measurement is written in any case
            result["about"]["no_picture"] = str(error)
    return result


@torch.inference_mode()
def measure_speed(
    lm: LanguageModel,
    options: SpeedOptions,
    progress: Progress | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measure and return plain data; `keep` gets the result so far after each context.

    Passages are random tokens: time and bytes depend on their number alone. Methods run with their guard, as users run
    them: where it refuses to fuse, the row says so and has the time of full prefill.
    """
    result: dict[str, Any] = {"kv_bytes_per_token": lm.kv_bytes_per_token, "prefill": [], "decode": []}
    generator = torch.Generator().manual_seed(0)
    prompts = [random_prompt(lm, context, options.chunk, generator) for context in options.contexts]
    with ExitStack() as stack:
        tiers = open_tiers(lm, options.tiers, options.numbers, stack, throttle=options.throttle, folder=options.folder)
        ceilings, runner = measure_ceilings(lm.device, lm.dtype), ModelRunner(lm, tiers[0].store)
        runners = [runner.with_store(tier.store) for tier in tiers]  # each measures its costs once, for the guard
        result["recording_s"] = seconds(lm, runner.prefills.compile)
        result["recording_refusal"] = runner.prefills.refusal
        recorded_pass_s = measure_recorded_pass(
            runner, PromptBuilder(lm.tokenizer, PromptTemplate(), lm.context_window.tokens)
        )
        for over_tier in runners:  # as an engine does for its guard
            over_tier.costs.recorded_pass_s = recorded_pass_s
        if options.requests:
            result["step_recording_s"] = seconds(lm, lambda: runner.decodes.compile(options.requests))
            result["step_recording_refusal"] = runner.decodes.refusal
        for done, prompt in enumerate(prompts):
            fill(lm, [tier.store for tier in tiers], prompt, [chosen.method for chosen in options.methods])
            result["prefill"] += _prefills(runners, tiers, prompt, options)
            method = (options.methods or (FULL_CONFIGURATION,))[0].method
            prefilled = fuse_prompt(runner, prompt, method.unguarded, answer_tokens=STEPS)
            result["decode"] += decode_steps(lm, runner.decodes, prefilled, options.requests)
            del prefilled  # free its buffer before the next one is allocated
            ceilings = ceilings.or_better(measure_ceilings(lm.device, lm.dtype))
            add_floors(result, ceilings, options.throttle)
            if keep is not None:
                keep(result)
            if progress is not None:
                progress(done + 1, len(options.contexts))
    return result


def random_prompt(lm: LanguageModel, context: int, chunk: int, generator: torch.Generator) -> Prompt:
    """Return a prompt of random tokens: a system prefix, passages of `chunk` tokens up to `context`, a question."""
    vocabulary = lm.model.get_input_embeddings().num_embeddings
    sizes = [min(chunk, context - start) for start in range(0, context, chunk)]
    lengths = [PREFIX_TOKENS, *sizes, QUESTION_TOKENS]
    if sum(lengths) + STEPS > lm.context_window.tokens:
        raise PromptTooLong(
            f"a context of {context:,} tokens exceeds the model's window of {lm.context_window.tokens:,}"
        )
    drawn = [tuple(torch.randint(vocabulary, (length,), generator=generator).tolist()) for length in lengths]
    roles = [Role.SYSTEM_PREFIX, *(Role.CHUNK for _ in sizes), Role.QUESTION]
    segments = tuple(Segment(role, ids, "") for role, ids in zip(roles, drawn, strict=True))
    return Prompt(segments, prefix_ids=drawn[0])


@dataclass(slots=True)
class _Side:
    """One configuration over one tier, with the report of a first call."""

    tier: StoreTier
    configuration: Configuration
    runner: ModelRunner
    report: FusionReport
    recorded_passes: int


def _prefills(
    runners: Sequence[ModelRunner], tiers: Sequence[StoreTier], prompt: Prompt, options: SpeedOptions
) -> list[dict[str, Any]]:
    """Time every side in turns, after a warm-up round, and return one row for each side; tiers have a runner each."""
    lm = runners[0].lm
    ids = torch.tensor([prompt.ids], device=lm.device)

    def stock() -> None:
        lm.model.generate(ids, max_new_tokens=1, do_sample=False, attention_mask=torch.ones_like(ids))

    def stock_s() -> float:
        with stock_attention(lm):
            return seconds(lm, stock)

    def run(runner: ModelRunner, method: Method) -> FusionReport:
        return fuse_prompt(runner, prompt, method).report

    sides: list[_Side] = []
    calls: dict[str, Callable[[], Any]] = {"stock": stock_s}
    fused = [(*at, chosen) for at in zip(tiers, runners, strict=True) for chosen in options.methods]
    for tier, runner, chosen in [(StoreTier("-", LOSSLESS, tiers[0].store), runners[0], FULL_CONFIGURATION), *fused]:
        call = partial(run, runner, chosen.method)
        replayed = runner.prefills.replayed
        sides.append(_Side(tier, chosen, runner, call(), runner.prefills.replayed - replayed))
        calls[str(len(sides))] = call
    stock_times, *reports = take_turns(calls, options.repeats).values()
    full_s = median(report.timings.ttft_s for report in reports[0])
    rows = []
    for side, side_reports in zip(sides, reports, strict=True):
        # Torch counts only the memory that it allocates itself, so this run takes no buffer from the pool.
        unpooled = copy.copy(side.runner)
        unpooled.pool = None
        again = partial(fuse_prompt, unpooled, prompt, side.configuration.method)
        row = _row(side, [report.timings for report in side_reports], lm, prompt, full_s, median(stock_times))
        rows.append({**row, "peak_bytes": peak_bytes(lm.device, again)})
    return rows


def _row(
    side: _Side, timings: list[Timings], lm: LanguageModel, prompt: Prompt, full_s: float, stock_s: float
) -> dict[str, Any]:
    ttft_s = [timing.ttft_s for timing in timings]
    middle = median(ttft_s)
    return {
        "context": sum(len(span) for span in prompt.chunks),
        "prompt": len(prompt),
        "method": side.configuration.label,
        "ratio": side.configuration.ratio,
        "tier": side.tier.name,
        "numbers": side.tier.numbers,
        "rows": side.report.rows,
        "recorded_passes": side.recorded_passes,
        "fallback": side.report.fallback,
        "predicted_s": side.report.predicted_s,
        "ttft_s": middle,
        "spread_s": max(ttft_s) - min(ttft_s),
        "full_s": full_s,
        "transformers_s": stock_s,
        "speedup": full_s / middle,
        "speedup_transformers": stock_s / middle,
        "operations": row_operations(lm, side.report.row_layers / lm.n_layers, len(prompt)),
        "full_operations": row_operations(lm, len(prompt), len(prompt)),
        "bytes_loaded": side.report.bytes_loaded,
        "stages_s": {
            stage: median(getattr(timing, f"{stage}_s") for timing in timings)
            for stage in ("load", "probe", "recompute")
        },
        "buffer_bytes": len(prompt) * lm.kv_bytes_per_token,
    }


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Return the most bytes of tensors that a call adds at once, as torch's allocator counts them."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        result = run()  # the result counts: it is freed after the last event
    del result
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())), default=0)


STEPS, STEPS_A_TURN = 16, 4


def decode_steps(
    lm: LanguageModel, decodes: DecodeRunner, prefilled: Prefilled, requests: Sequence[int]
) -> list[dict[str, Any]]:
    """Time decode steps of a prefilled prompt for each batch size; the first of `STEPS` steps is a warm-up.

    A side takes some steps in its turn, as an answer does: on a GPU the first step after a pause takes longer.
    transformers' steps are timed for a single request only, as there is memory for two more copies of the keys and
    values; those of its faster cache count.
    """
    token, start = int(prefilled.logits.argmax()), prefilled.report.prompt_tokens
    rows = []
    for n_requests in requests:
        buffers = [_clone(prefilled.buffer) for _ in range(n_requests)]
        stock = dict(stock_steps(lm, prefilled.buffer, start, token)) if n_requests == 1 else {}
        engine_s: list[float] = []
        stock_s: dict[str, list[float]] = {cache: [] for cache in stock}
        for first in range(start, start + STEPS, STEPS_A_TURN):
            for position in range(first, first + STEPS_A_TURN):
                step = partial(decodes, [token] * n_requests, [position] * n_requests, buffers)
                engine_s.append(seconds(lm, step))
            for cache, stock_step in stock.items():
                with stock_attention(lm):
                    stock_s[cache] += [seconds(lm, stock_step) for _ in range(STEPS_A_TURN)]
        step_s, medians = median(engine_s[1:]), {cache: median(times[1:]) for cache, times in stock_s.items()}
        row = {
            "context": sum(len(span) for span in prefilled.prompt.chunks),
            "requests": n_requests,
            "recorded": decodes.refusal is None,
            "step_s": step_s,
            "transformers_step_s": min(medians.values(), default=None),
            "transformers_cache": min(medians, key=medians.__getitem__, default=None),
            "tokens_per_s": n_requests / step_s,
            "bytes": step_bytes(lm, start, n_requests),
        }
        rows.append(row)
    return rows


def stock_steps(
    lm: LanguageModel, buffer: KVBuffer, length: int, token: int
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Yield transformers' decode steps over the same keys and values, in its caches.

    The dynamic cache is the default of its `generate`. It grows with every step, so a backend that plans for each
    length is slow; the static cache has room for `STEPS` steps and keeps its shape.
    """
    config, ids = lm.model.config.get_text_config(), torch.tensor([[token]], device=lm.device)

    def step(cache: Cache) -> torch.Tensor:
        logits: torch.Tensor = lm.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits

    for name, cache in (
        ("dynamic", DynamicCache(config=config)),
        ("static", StaticCache(config=config, max_cache_len=length + STEPS)),
    ):
        for layer, (keys, values) in enumerate(zip(buffer.keys, buffer.values, strict=True)):
            cache.update(keys[:, :, :length], values[:, :, :length], layer)
        yield name, partial(step, cache)


def _clone(buffer: KVBuffer) -> KVBuffer:
    keys, values = (tuple(layer.clone() for layer in layers) for layers in (buffer.keys, buffer.values))
    return KVBuffer(keys, values)
