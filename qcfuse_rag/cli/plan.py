"""`qcfuse plan`: estimate the size, cost and speed of a corpus before it is warmed.

The estimate is plain arithmetic: operations and bytes of a model's shape, over rates. The rates of this machine are
measured. Rates of another GPU come from its data sheet, multiplied by an assumed utilisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from operator import mul
from pathlib import Path

import torch
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from qcfuse_rag.cli.console import OUT, duration, print_json, print_line, size, status
from qcfuse_rag.cli.options import PlanOptions
from qcfuse_rag.errors import ModelNotFound, QCFuseError
from qcfuse_rag.models.compatibility import sliding_windows
from qcfuse_rag.models.source import fetch_options
from qcfuse_rag.runtime.device import fastest_s

HERE = "here"
REACHED = 0.5  # share of a data sheet's rates that a program is assumed to reach
QUESTION_TOKENS = 64  # of the question and the template
BYTES_PER_NUMBER = {"model": 2.0, "int8": 1.0}  # bytes of a stored number; scales add some percent


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a machine: operations a second in the model's dtype, bytes a second of each tier, and their source."""

    flops: float
    tiers: Mapping[str, float]
    source: str


# Dense bf16 operations, bytes of memory, and bytes of the host link in one direction, a second; from data sheets.
SHEETS = {
    "a100": (312e12, 2.0e12, 32e9),
    "l40s": (362e12, 0.864e12, 32e9),
    "h100": (989e12, 3.35e12, 64e9),
    "h200": (989e12, 4.8e12, 64e9),
    "b200": (2250e12, 8.0e12, 64e9),
}
NVME, NETWORK = 7e9, 3.125e9
"""Bytes a second of a PCIe 4 NVMe drive and of 25-gigabit Ethernet."""

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _config(family: str, kv_heads: int, *sizes: int, **more: object) -> dict[str, object]:
    return {"model_type": family, "num_key_value_heads": kv_heads, **dict(zip(SIZES, sizes, strict=True)), **more}


# From the published `config.json` of each model.
SHAPES = {
    "smollm2-135m": _config("llama", 3, 49152, 576, 1536, 30, 9, tie_word_embeddings=True),
    "qwen3-0.6b": _config("qwen3", 8, 151936, 1024, 3072, 28, 16, head_dim=128, tie_word_embeddings=True),
    "qwen3-8b": _config("qwen3", 8, 151936, 4096, 12288, 36, 32, head_dim=128),
    "qwen3-32b": _config("qwen3", 8, 151936, 5120, 25600, 64, 64, head_dim=128),
    "llama-3.1-8b": _config("llama", 8, 128256, 4096, 14336, 32, 32),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model."""

    weights: int  # numbers in the matrices of the layers, which multiply every row; all experts of a mixture count
    logit_weights: int  # numbers in the matrix of the logits
    attention: int  # operations of a row for each token that it attends to
    kv: int  # numbers in a token's keys and values

    def operations(self, rows: float, context: float) -> float:
        """Return the operations of rows that attend to `context` tokens on average."""
        return rows * (2 * self.weights + self.attention * context)


@dataclass(frozen=True, slots=True)
class TierTimes:
    """Seconds of a request over one tier: loading, computing, and to the first token with both side by side."""

    load_s: float
    compute_s: float
    ttft_s: float
    times_as_fast: float


@dataclass(frozen=True, slots=True)
class Sizing:
    """The estimate for a corpus: bytes and warming of all nodes, and the times of a request.

    Several machines share the warming hours. `full_ttft_s` is without a store. `break_even_uses` are the retrievals of
    a node until its warming has paid in computing time; None if never.
    """

    kv_bytes_per_token: float
    corpus_bytes: float
    warming_hours: float
    full_ttft_s: float
    break_even_uses: float | None
    tiers: dict[str, TierTimes]
    rates: Rates


def size_up(shape: ModelShape, rates: Rates, plan: PlanOptions, *, question_tokens: int = QUESTION_TOKENS) -> Sizing:
    """Estimate what a corpus takes."""
    token_bytes = shape.kv * BYTES_PER_NUMBER[plan.kv_dtype]
    passage_tokens = plan.retrieved * plan.tokens
    context = passage_tokens + question_tokens
    logits = 2 * shape.logit_weights
    full_s = (shape.operations(context, context / 2) + logits) / rates.flops
    # Recomputed rows are spread over the prompt; the rows of the question see all of it.
    recomputed = shape.operations(plan.ratio * passage_tokens, context / 2)
    compute_s = (recomputed + shape.operations(question_tokens, context) + logits) / rates.flops
    warm_node_s = plan.caches * shape.operations(plan.tokens, plan.tokens / 2) / rates.flops
    saved_s = (full_s - compute_s) / plan.retrieved
    tiers = {}
    for name, bytes_s in rates.tiers.items():
        load_s = passage_tokens * token_bytes / bytes_s
        ttft_s = max(compute_s, load_s)
        tiers[name] = TierTimes(load_s, compute_s, ttft_s, full_s / ttft_s)
    return Sizing(
        kv_bytes_per_token=token_bytes,
        corpus_bytes=plan.caches * plan.nodes * plan.tokens * token_bytes,
        warming_hours=plan.nodes * warm_node_s / 3600,
        full_ttft_s=full_s,
        break_even_uses=warm_node_s / saved_s if saved_s > 0 else None,
        tiers=tiers,
        rates=rates,
    )


def shape_of(model: str) -> ModelShape:
    """Return the sizes of a model, from a shape's name, a folder, or a Hugging Face id, without reading weights."""
    config: PretrainedConfig
    if model in SHAPES:
        config = AutoConfig.for_model(**SHAPES[model])
    else:
        try:
            source = str(Path(model).expanduser()) if Path(model).exists() else model
            config = AutoConfig.from_pretrained(source, **fetch_options(source))
        except (OSError, ValueError) as error:
            raise ModelNotFound(f"there is no model {model!r}, nor a shape; shapes are {', '.join(SHAPES)}") from error
    text = config.get_text_config()
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(text)
    outside = {id(part.weight) for part in built.modules() if isinstance(part, nn.Embedding)}
    outside.add(id(built.get_output_embeddings().weight))
    weights = sum(weight.numel() for weight in built.parameters() if weight.dim() > 1 and id(weight) not in outside)
    layers = [*text.per_layer_config]
    heads = [layer.num_attention_heads for layer in layers]
    widths = [getattr(layer, "head_dim", None) or text.hidden_size // layer.num_attention_heads for layer in layers]
    stored = [layer.num_key_value_heads or layer.num_attention_heads for layer in layers[: len(sliding_windows(text))]]
    return ModelShape(
        weights=weights,
        logit_weights=built.get_output_embeddings().weight.numel(),
        attention=4 * sum(map(mul, heads, widths)),
        kv=2 * sum(map(mul, stored, widths)),
    )


def rates_of(gpu: str, *, reached: float = REACHED) -> Rates:
    """Return a GPU's rates from its data sheet; refuse a GPU that is not in the table."""
    if gpu.lower() not in SHEETS:
        raise QCFuseError(
            f"there is no data sheet of {gpu!r}; there are {', '.join(SHEETS)}, and `{HERE}` measures this machine"
        )
    flops, memory, link = (rate * reached for rate in SHEETS[gpu.lower()])
    tiers = {"device": memory / 2, "host memory": link, "NVMe": NVME * reached, "network": NETWORK * reached}
    return Rates(flops, tiers, f"data sheet x {reached:g}, an assumption and not a measurement")


SAMPLES = 7
"""Measurements of a rate, of which the best counts."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best rates measured here."""

    flops: float  # floating-point operations a second of a large matrix product in the model's dtype
    memory: float  # bytes a second of a large copy in the model's memory; a byte read and written counts twice
    loading: float  # bytes a second from page-locked host memory to the device; on a CPU, those of a copy


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure each rate as the best of `SAMPLES`."""
    gpu = device.type == "cuda"
    size, count = (8192, 1 << 28) if gpu else (1536, 1 << 25)
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    product_s = fastest_s(device, lambda: left @ right, SAMPLES)
    target, source = (torch.randn(count, device=device) for _ in range(2))
    memory = 2 * target.nbytes / fastest_s(device, lambda: target.copy_(source), SAMPLES)
    loading = memory / 2  # a copy reads and writes each byte
    if gpu:
        host = torch.empty(count, pin_memory=True)
        loading = target.nbytes / fastest_s(device, lambda: target.copy_(host), SAMPLES)
    return Ceilings(2 * size**3 / product_s, memory, loading)


def rates_here() -> Rates:
    """Measure this machine; the rates of disk and network are assumed."""
    gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if gpu else (torch.device("cpu"), torch.float32)
    ceilings = measure_ceilings(device, dtype)
    tiers = {"memory": ceilings.loading, "NVMe": NVME * REACHED, "network": NETWORK * REACHED}
    kind = torch.cuda.get_device_name() if gpu else f"{torch.get_num_threads()} threads of a CPU"
    return Rates(ceilings.flops, tiers, f"operations and memory measured here, {kind}; NVMe and network assumed")


def plan_corpus(options: PlanOptions, *, as_json: bool) -> None:
    """Print bytes, warming hours, break-even uses, and the time to the first token from each tier."""
    shape = shape_of(options.model)
    if options.gpu == HERE:
        with status("measuring this machine"):
            rates = rates_here()
    else:
        rates = rates_of(options.gpu, reached=options.reached)
    sizing = size_up(shape, rates, options)
    if as_json:
        print_json(asdict(sizing))
    else:
        _print_sizing(sizing, options)


def _print_sizing(sizing: Sizing, options: PlanOptions) -> None:
    warming, per_token = duration(3600 * sizing.warming_hours), sizing.kv_bytes_per_token / 1024
    print_line(
        f"{options.nodes:,} passages of {options.tokens} tokens, {options.model}, {options.gpu}: "
        f"{size(sizing.corpus_bytes)} ({options.caches} caches of each, {per_token:.0f} KiB per token), "
        f"{warming} of warming on one machine"
    )
    uses, break_even = sizing.break_even_uses, "warming never pays off at this ratio"
    if uses is not None:
        break_even = f"in computing time, warming a passage pays off after {uses:.1f} retrievals"
    print_line(
        f"{break_even}; without a store, the first token of a prompt of {options.retrieved} passages takes "
        f"{_seconds(sizing.full_ttft_s)}"
    )
    table = Table("tier", "loading", f"computing at {options.ratio:g}", "first token", "times as fast", box=None)
    for name, tier in sizing.tiers.items():
        row = (_seconds(tier.load_s), _seconds(tier.compute_s), _seconds(tier.ttft_s), f"{tier.times_as_fast:.1f}")
        table.add_row(name, *row)
    OUT.print(table)
    print_line(f"rates: {sizing.rates.source}. Lower bounds, with loading and computing in parallel.")


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
