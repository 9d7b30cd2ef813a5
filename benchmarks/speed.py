"""Time to first token and decode rate over context lengths, ratios and storage tiers, beside transformers.

Passages are random tokens: time and bytes depend on their number alone. All sides take turns in one process. Methods
run with their guard, as users run them: where it refuses to fuse, the row says so and has the time of full prefill.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import Cache, DynamicCache, StaticCache
from typer import Option

from benchmarks.configurations import FULL, Configuration, configurations, split_names
from benchmarks.floors import measure_ceilings, random_model, row_operations, seconds, step_bytes
from benchmarks.options import Methods, ModelOptions, Ratios, Repeats, counts, shares
from benchmarks.runner import Key, Record, Report, Run, Table, about_model, machine_conditions
from qcfuse_rag.engine.first_passes import measure_passes
from qcfuse_rag.errors import PromptTooLong, QCFuseError
from qcfuse_rag.fusion.method import IN_FULL, Method
from qcfuse_rag.fusion.pipeline import Prefilled, fuse_prompt
from qcfuse_rag.ingestion.prefill import PrefillTarget
from qcfuse_rag.ingestion.primer import PRIMER_TOKENS
from qcfuse_rag.ingestion.warm_job import WarmJob
from qcfuse_rag.models.cpu_weights import PackedLinear
from qcfuse_rag.models.rope import cache_argument
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.segments import Prompt, Role, Segment
from qcfuse_rag.prompts.template import PromptTemplate
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.graphs.runners import DecodeRunner
from qcfuse_rag.runtime.kernels.support import unavailable_reason
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.model_views import view_of
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.backends.base import KVStore, Miss
from qcfuse_rag.store.backends.disk import DiskStore
from qcfuse_rag.store.backends.memory import UNLIMITED, MemoryStore
from qcfuse_rag.store.quantization import LOSSLESS, STORE_FORMATS
from qcfuse_rag.verification.exactness import stock_attention

TIERS = ("memory", "device", "pinned", "disk")
PREFIX_TOKENS, QUESTION_TOKENS = 32, 32
STEPS, STEPS_A_TURN = 16, 4
TRANSFORMERS = "transformers"
STAGES = ("load_s", "probe_s", "recompute_s")
FULL_CONFIGURATION = configurations(())[0]
DEFAULT_TIERS = {"cpu": "memory,disk", "cuda": "pinned,device,disk"}


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Options of the measurement."""

    shape: Annotated[
        str | None, Option(help="Model shape with random weights, instead of a model: qwen3-8b, llama-3.1-8b, ...")
    ] = None
    context: Annotated[str, Option(help="Numbers of passage tokens, with commas.")] = "4096"
    methods: Methods = "auto"
    ratios: Ratios = "0.05,0.1,0.2"
    tiers: Annotated[
        str, Option(help=f"Storage tiers: {', '.join(TIERS)}; by default memory,disk, on a GPU pinned,device,disk.")
    ] = ""
    kv_dtype: Annotated[str, Option(help="Number formats of stored passages: model, int8; with commas.")] = LOSSLESS
    chunk: Annotated[int, Option(min=1, help="Tokens of a passage.")] = 512
    requests: Annotated[str, Option(help="Batch sizes to decode, with commas.")] = "1,4,8"
    folder: Annotated[Path | None, Option(help="Folder on the disk to measure; by default a temporary one.")] = None
    repeats: Repeats = 5

    def load(self) -> LanguageModel:
        """Load the model, or make one of the shape."""
        if self.shape is None:
            return self.load_model()
        if self.model is not None:
            raise QCFuseError("give a --model or a --shape, not both")
        return random_model(self.shape, device=self.device, dtype=self.dtype, weights=self.weights)

    def configurations(self) -> list[Configuration]:
        """Return the methods at their ratios."""
        return configurations(split_names(self.methods), shares(self.ratios))[1:]


def measure(options: Options, run: Run) -> None:
    """Time the first token of each method from each tier, decode steps, and the limits of the machine."""
    measure_model(options.load(), options, run)


@dataclass(frozen=True, slots=True)
class StoreTier:
    """A store to measure, the name of its tier, and the format that it keeps passages in."""

    name: str
    kv_dtype: str
    store: KVStore


def open_tiers(
    lm: LanguageModel, names: Sequence[str], formats: Sequence[str], stack: ExitStack, *, folder: Path | None
) -> list[StoreTier]:
    """Open a store for each tier in each format; the stack closes them. An error lists what exists here."""
    available = [tier for tier in TIERS if lm.device.type == "cuda" or tier not in ("device", "pinned")]
    for name in names:
        if name not in available:
            raise QCFuseError(f"there is no tier {name!r} on {lm.device.type}; there are {', '.join(available)}")
    for kv_dtype in formats:
        if kv_dtype not in STORE_FORMATS:
            raise QCFuseError(f"there is no kv_dtype {kv_dtype!r}; there are {', '.join(STORE_FORMATS)}")

    def open_tier(name: str, kv_dtype: str) -> KVStore:
        if name == "disk":
            path = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
            return stack.enter_context(DiskStore(path, UNLIMITED, kv_dtype=kv_dtype))
        device = str(lm.device) if name == "device" else "cpu"
        return MemoryStore(UNLIMITED, device=device, pinned=name == "pinned", kv_dtype=kv_dtype)

    return [StoreTier(name, kv_dtype, open_tier(name, kv_dtype)) for name in names for kv_dtype in formats]


def fill(lm: LanguageModel, stores: Sequence[KVStore], prompt: Prompt, methods: Sequence[Method]) -> None:
    """Prefill a prompt's passages once, in the model's own dtype, and put them into every store."""
    first = next((store for store in stores if store.kv_dtype == LOSSLESS), MemoryStore(UNLIMITED))
    bases = dict.fromkeys(base for method in methods for base in method.bases)
    passages = [span.segment.ids for span in prompt.chunks]
    primer = passages[0][:PRIMER_TOKENS]
    WarmJob(PrefillTarget(lm, first, prompt.prefix_ids, primer), passages, bases=bases).run()
    for store in stores:
        for entry in first.entries() if store is not first else ():
            opened = first.open(entry.address)
            if not isinstance(opened, Miss) and opened[0] not in store:
                store.put(*opened)


@torch.inference_mode()
def measure_model(lm: LanguageModel, options: Options, run: Run) -> None:
    """Measure a loaded model; see `measure`."""
    contexts, requests, methods = counts(options.context), counts(options.requests), options.configurations()
    if min((*contexts, *requests)) < 1:
        raise QCFuseError("contexts and requests must be more than 0")
    names = split_names(options.tiers or DEFAULT_TIERS["cuda" if lm.device.type == "cuda" else "cpu"])
    generator = torch.Generator().manual_seed(0)
    prompts = [random_prompt(lm, context, options.chunk, generator) for context in contexts]
    kernels = unavailable_reason(lm.device, lm.dtype, lm.widest_head) or "used"
    same = {**machine_conditions(lm), "chunk": options.chunk}
    with ExitStack() as stack:
        formats = split_names(options.kv_dtype) or [LOSSLESS]
        tiers = open_tiers(lm, names, formats, stack, folder=options.folder)
        run.begin({**about_model(lm), "kernels": kernels, "kv_bytes_per_token": lm.kv_bytes_per_token}, same)
        runner = ModelRunner(lm, tiers[0].store)
        recording = {"prefill_s": seconds(lm, runner.prefills.compile), "prefill_refusal": runner.prefills.refusal}
        runners, prompter = [], PromptBuilder(lm.tokenizer, PromptTemplate(), lm.context_window.tokens)
        for tier in tiers:
            runners.append(runner.with_store(tier.store))
            measure_passes(runners[-1], prompter)
        if requests:
            recording["step_s"] = seconds(lm, lambda: runner.decodes.compile(requests))
            recording["step_refusal"] = runner.decodes.refusal
        run.add(("recording",), recording)
        for done, prompt in enumerate(prompts):
            fill(lm, [tier.store for tier in tiers], prompt, [chosen.method for chosen in methods])
            _prefills(runners, tiers, prompt, methods, options.repeats, run)
            if any(("decode", contexts[done], count) not in run.records for count in requests):
                method = (methods or [FULL_CONFIGURATION])[0].method
                prefilled = fuse_prompt(runner, prompt, method.unguarded, answer_tokens=STEPS)
                for row in decode_steps(lm, runner.decodes, prefilled, requests):
                    run.add(("decode", contexts[done], row["requests"]), row)
                del prefilled  # free its buffer before the next one is allocated
            ceilings = measure_ceilings(lm.device, lm.dtype)
            rates = {"flops": ceilings.flops, "memory": ceilings.memory, "loading": ceilings.loading}
            run.add(("ceilings", len(run.of("ceilings"))), rates)
            run.progress(done + 1, len(contexts))


def _prefills(
    runners: Sequence[ModelRunner],
    tiers: Sequence[StoreTier],
    prompt: Prompt,
    methods: Sequence[Configuration],
    repeats: int,
    run: Run,
) -> None:
    lm, context = runners[0].lm, sum(len(span) for span in prompt.chunks)
    ids, model = torch.tensor([prompt.ids], device=lm.device), stock_model(lm.model)

    def stock() -> Record:
        with stock_attention(lm):
            generate = partial(model.generate, ids, max_new_tokens=1, do_sample=False)
            return {"ttft_s": seconds(lm, lambda: generate(attention_mask=torch.ones_like(ids)))}

    def fused(runner: ModelRunner, chosen: Configuration) -> Record:
        replayed = runner.prefills.replayed
        report = fuse_prompt(runner, prompt, chosen.method).report
        return {
            "ttft_s": report.timings.ttft_s,
            **{stage: getattr(report.timings, stage) for stage in STAGES},
            "rows": report.rows,
            "operations": row_operations(lm, report.row_layers / lm.n_layers, len(prompt)),
            "bytes_loaded": report.bytes_loaded,
            "recorded_passes": runner.prefills.replayed - replayed,
            "fallback": report.fallback,
            "predicted_s": report.predicted_s,
        }

    sides: dict[Key, Callable[[], Record]] = {(TRANSFORMERS, None, "-", LOSSLESS): stock}
    sides[FULL, None, "-", LOSSLESS] = partial(fused, runners[0], FULL_CONFIGURATION)
    unpooled: dict[Key, Callable[[], object]] = {}
    for tier, runner in zip(tiers, runners, strict=True):
        # Torch counts only the memory that it allocates itself, so these runs take no buffer from the pool.
        own_memory = copy.copy(runner)
        own_memory.pool = None
        for chosen in methods:
            side = (chosen.label, chosen.ratio, tier.name, tier.kv_dtype)
            sides[side] = partial(fused, runner, chosen)
            unpooled[side] = partial(fuse_prompt, own_memory, prompt, chosen.method)
    run.take_turns(("prefill", context), sides, repeats)
    size = {"full_operations": row_operations(lm, len(prompt), len(prompt)), "prompt": len(prompt)}
    run.add(("prompt", context), {**size, "buffer_bytes": len(prompt) * lm.kv_bytes_per_token})
    for measured, call in unpooled.items():
        if ("memory", context, *measured) not in run.records:
            run.add(("memory", context, *measured), {"peak_bytes": peak_bytes(lm.device, call)})


def report(run: Run) -> Report:
    """Return the medians of all sides beside the lower bounds at the best rates that were measured.

    `calculated` is full prefill's operations at those rates. No engine computes them in less time, so the ratio is a
    lower bound on the speedup over any full prefill.
    """
    ceilings: Record = {}
    for _, rates in run.of("ceilings"):  # a busy machine measures too low and never too high
        ceilings = {name: max(rate, ceilings.get(name, 0.0)) for name, rate in rates.items()}
    groups: dict[Key, list[Record]] = {}
    for (*side, _), record in run.of("prefill"):
        groups.setdefault(tuple(side), []).append(record)
    sizes, peaks = dict(run.of("prompt")), dict(run.of("memory"))
    rows: list[Record] = []
    for (context, *side), records in groups.items():
        full, stock = (groups.get((context, name, None, "-", LOSSLESS)) for name in (FULL, TRANSFORMERS))
        if side[0] == TRANSFORMERS or full is None or stock is None:
            continue
        row = _row(records, _middle(full, "ttft_s"), _middle(stock, "ttft_s"))
        named = dict(zip(("method", "ratio", "tier", "kv_dtype"), side, strict=True))
        size = {**sizes.get((context,), {}), **peaks.get((context, *side), {})}
        row = {"context": context, **named, **row, **size}
        rows.append({**row, **(_floors(row, ceilings) if ceilings and size else {})})
    decode = [row for _, row in run.of("decode")]
    if ceilings:
        decode = [{**row, "bytes_s": row["bytes"] / ceilings["memory"]} for row in decode]
    summary = {"ceilings": ceilings, "prefill": rows, "decode": decode}
    title = f"decode steps of {run.about['model']}"
    tables = [
        Table(f"first token of {run.about['model']}", PREFILL, list(map(_prefill_cells, rows)), NARROW),
        Table(title, DECODE, list(map(_decode_cells, decode)), NARROW_DECODE),
    ]
    rate = "{flops:.3g} operations/s, memory {memory:.3g} bytes/s, loading {loading:.3g} bytes/s"
    notes = [f"measured ceilings: {rate.format_map(ceilings)}"] if ceilings else []
    return Report(summary, [table for table in tables if table.rows], notes)


def _middle(records: Sequence[Record], name: str) -> float:
    return float(median(record[name] for record in records))


def _row(records: Sequence[Record], full_s: float, stock_s: float) -> Record:
    times, middle = [record["ttft_s"] for record in records], _middle(records, "ttft_s")
    kept = ("rows", "operations", "bytes_loaded", "recorded_passes", "fallback", "predicted_s")
    return {
        **{name: records[-1][name] for name in kept},
        "ttft_s": middle,
        "spread_s": max(times) - min(times),
        "full_s": full_s,
        "transformers_s": stock_s,
        "speedup": full_s / middle,
        "speedup_transformers": stock_s / middle,
        "stages_s": {stage.removesuffix("_s"): _middle(records, stage) for stage in STAGES},
    }


def _floors(row: Record, ceilings: Record) -> Record:
    rates = {"device": ceilings["memory"] / 2}
    arithmetic_s = row["operations"] / ceilings["flops"]
    loading_s = row["bytes_loaded"] / rates.get(row["tier"], ceilings["loading"])
    return {
        "arithmetic_s": arithmetic_s,
        "loading_s": loading_s,
        "of_floor": max(arithmetic_s, loading_s) / row["ttft_s"],
        "speedup_calculated": row["full_operations"] / ceilings["flops"] / row["ttft_s"],
    }


PREFILL = (
    "context", "method", "ratio", "tier", "rows", "TTFT", "spread", "full / it", "transformers / it", "calculated / it",
    "guard", "arithmetic", "loading", "of the floor", "load / probe / recompute", "peak over buffer",
)  # fmt: skip
NARROW = ("context", "method", "ratio", "tier", "rows", "TTFT", "full / it")
DECODE = ("context", "requests", "step", "transformers", "its cache", "tokens a second", "its bytes", "of the floor")
NARROW_DECODE = ("context", "requests", "step", "transformers", "tokens a second")


def _prefill_cells(row: Record) -> list[str]:
    tier = row["tier"] if row["kv_dtype"] == LOSSLESS else f"{row['tier']} {row['kv_dtype']}"
    guard = "-"
    if row["predicted_s"] is not None:
        decision = "in full" if (row["fallback"] or "").startswith(IN_FULL) else "fuses"
        guard = f"{decision}, {_ms(row['predicted_s'])}"
    peak = row.get("peak_bytes")
    return [
        f"{row['context']:,}",
        row["method"],
        "-" if row["ratio"] is None else f"{row['ratio']:g}",
        tier,
        f"{row['rows']:,}",
        _ms(row["ttft_s"]),
        f"{1000 * row['spread_s']:,.1f}",
        *(f"{row[name]:.1f}x" for name in ("speedup", "speedup_transformers")),
        f"{row['speedup_calculated']:.1f}x" if "speedup_calculated" in row else "",
        guard,
        *(_ms(row.get(name)) for name in ("arithmetic_s", "loading_s")),
        f"{row['of_floor']:.2f}" if "of_floor" in row else "",
        " / ".join(f"{1000 * s:,.1f}" for s in row["stages_s"].values()),
        "" if peak is None else f"{(peak - row['buffer_bytes']) / 1e6:+,.0f} MB of {row['buffer_bytes'] / 1e6:,.0f}",
    ]


def _decode_cells(row: Record) -> list[str]:
    return [
        f"{row['context']:,}",
        str(row["requests"]),
        _ms(row["step_s"]),
        _ms(row["transformers_step_s"]),
        row["transformers_cache"] or "",
        f"{row['tokens_per_s']:,.1f}",
        _ms(row.get("bytes_s")),
        f"{row['bytes_s'] / row['step_s']:.2f}" if "bytes_s" in row else "",
    ]


def _ms(seconds_: float | None) -> str:
    return "" if seconds_ is None else f"{1000 * seconds_:,.1f} ms"


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


def decode_steps(
    lm: LanguageModel, decodes: DecodeRunner, prefilled: Prefilled, requests: Sequence[int]
) -> list[Record]:
    """Time decode steps of a prefilled prompt for each batch size; the first of `STEPS` steps is a warm-up.

    A side takes some steps in its turn, as an answer does: on a GPU the first step after a pause takes longer.
    transformers' steps are timed for a single request only, as there is memory for two more copies of the keys and
    values; those of its faster cache count.
    """
    token, start = int(prefilled.logits.argmax()), prefilled.report.prompt_tokens
    rows: list[Record] = []
    for n_requests in requests:
        buffers = [clone(prefilled.buffer) for _ in range(n_requests)]
        stock = dict(stock_steps(lm, prefilled.prompt.ids, token)) if n_requests == 1 else {}
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
        row: Record = {
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


def stock_model(module: Any) -> Any:
    """Return a view of a model whose linear layers are torch's own, with copies of weights that are packed."""
    if not isinstance(module, PackedLinear):
        return view_of(module, {name: child and stock_model(child) for name, child in module._modules.items()})
    linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
    linear.weight, linear.bias = nn.Parameter(module.weight, requires_grad=False), module.bias
    return linear


def stock_steps(
    lm: LanguageModel, prompt_ids: Sequence[int], token: int
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Yield transformers' decode steps behind a prompt, in its caches.

    The dynamic cache is the default of its `generate`. It grows with every step, so a backend that plans for each
    length is slow; the static cache has room for `STEPS` steps and keeps its shape.
    """
    model, config = stock_model(lm.model), lm.model.config.get_text_config()

    def step(cache: Cache, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(
            input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_argument(): cache}
        ).logits
        return logits

    for name, cache in (
        ("dynamic", DynamicCache(config=config)),
        ("static", StaticCache(config=config, max_cache_len=len(prompt_ids) + STEPS)),
    ):
        with stock_attention(lm), torch.inference_mode():
            step(cache, torch.tensor([prompt_ids], device=lm.device))
        yield name, partial(step, cache, torch.tensor([[token]], device=lm.device))


def clone(buffer: KVBuffer) -> KVBuffer:
    """Return a copy of a buffer, without the states of recurrent layers."""
    keys, values = (tuple(layer.clone() for layer in layers) for layers in (buffer.keys, buffer.values))
    return KVBuffer(keys, values, latent=buffer.latent)
