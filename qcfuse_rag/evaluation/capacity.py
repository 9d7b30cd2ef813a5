"""What a corpus takes: bytes, hours, uses until it pays, and the time to the first token from each tier.

Arithmetic and nothing else: operations and bytes of a model's shape, over rates. Rates of a machine that is here are
measured; those of a GPU that is not are its data sheet's, times the share of it that programs are taken to reach.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from qcfuse_rag.errors import ModelNotFound, QCFuseError
from qcfuse_rag.evaluation.speed.shapes import SHAPES

HERE = "here"
REACHED = 0.5
"""Share of a data sheet's rates that a program is taken to reach; an assumption."""

NUMBERS = {"model": 2.0, "int8": 1.0, "fp8": 1.0}
"""Bytes of a number of keys and values; scales come on top, some percent."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does in a second.

    Attributes:
        flops: floating-point operations in the model's dtype.
        tiers: bytes that each tier gives.
        source: where the numbers are from.
    """

    flops: float
    tiers: Mapping[str, float]
    source: str


# Dense bf16, memory, and what its host link brings in one direction; the makers' data sheets.
SHEETS = {
    "a100": (312e12, 2.0e12, 32e9),
    "l40s": (362e12, 0.864e12, 32e9),
    "h100": (989e12, 3.35e12, 64e9),
    "h200": (989e12, 4.8e12, 64e9),
    "b200": (2250e12, 8.0e12, 64e9),
}
NVME, NETWORK = 7e9, 3.125e9
"""Bytes a second of a PCIe 4 NVMe drive and of 25-gigabit Ethernet."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model in numbers.

    Attributes:
        weights: numbers in the matrices of its layers, by which every row is multiplied; all experts of a mixture.
        head: numbers in the matrix that gives the logits.
        attention: operations of a row for each token that it attends to.
        kv: numbers that a token's keys and values are.
    """

    weights: int
    head: int
    attention: int
    kv: int

    def operations(self, rows: float, context: float) -> float:
        """Return the operations of rows that attend to `context` tokens on average."""
        return rows * (2 * self.weights + self.attention * context)


@dataclass(frozen=True, slots=True)
class TierTimes:
    """A request from one tier: seconds of loading, of computing, and to the first token, the two side by side."""

    load_s: float
    compute_s: float
    ttft_s: float
    times_as_fast: float


@dataclass(frozen=True, slots=True)
class Sizing:
    """What a corpus takes.

    Attributes:
        kv_bytes_per_token: of keys and values as stored.
        corpus_bytes: of all nodes.
        warming_hours: of one machine; so many machines, so much less.
        full_ttft_s: to the first token without any of this.
        break_even_uses: retrievals of a node until its warming has paid in computing time; infinite if never.
        tiers: a request from each tier.
        rates: with their source.
    """

    kv_bytes_per_token: float
    corpus_bytes: float
    warming_hours: float
    full_ttft_s: float
    break_even_uses: float
    tiers: dict[str, TierTimes]
    rates: Rates

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, which knows no infinity: None uses if warming never pays."""
        uses = self.break_even_uses
        return {**asdict(self), "break_even_uses": uses if math.isfinite(uses) else None}


def size_up(
    shape: ModelShape,
    rates: Rates,
    *,
    nodes: int,
    tokens: int,
    retrieved: int = 10,
    asked: int = 64,
    ratio: float = 0.05,
    number_bytes: float = 2.0,
    caches: int = 2,
) -> Sizing:
    """Size a corpus up.

    Args:
        shape: of the model.
        rates: of the machine.
        nodes: passages in the corpus.
        tokens: of a passage.
        retrieved: passages of a request.
        asked: tokens of a request besides: the question and the template.
        ratio: share of the passages' tokens that is recomputed.
        number_bytes: of a stored number, see `STORE_FORMATS`.
        caches: kept of each passage; the default method keeps two and reads one of them.
    """
    per_token = shape.kv * number_bytes
    context = retrieved * tokens + asked
    head = 2 * shape.head
    full = (shape.operations(context, context / 2) + head) / rates.flops
    rows = asked + ratio * retrieved * tokens
    # Recomputed rows are spread over the prompt; the question's see all of it.
    fused = shape.operations(rows - asked, context / 2) + shape.operations(asked, context) + head
    compute, load = fused / rates.flops, retrieved * tokens * per_token
    warm_one = caches * shape.operations(tokens, tokens / 2) / rates.flops
    saved_one = (full - compute) / retrieved
    tiers = {}
    for name, speed in rates.tiers.items():
        took = max(compute, load / speed)
        tiers[name] = TierTimes(load / speed, compute, took, full / took)
    return Sizing(
        kv_bytes_per_token=per_token,
        corpus_bytes=caches * nodes * tokens * per_token,
        warming_hours=nodes * warm_one / 3600,
        full_ttft_s=full,
        break_even_uses=warm_one / saved_one if saved_one > 0 else math.inf,
        tiers=tiers,
        rates=rates,
    )


def shape_of(model: str) -> ModelShape:
    """Return the numbers of a model by one of the names of `bench speed`, a folder, or a Hugging Face id.

    No weights are read: the model is built without memory.

    Raises:
        ModelNotFound: if nothing of that name can be read or fetched.
    """
    config: PretrainedConfig
    if model in SHAPES:
        config = AutoConfig.for_model(**SHAPES[model])
    else:
        try:
            config = AutoConfig.from_pretrained(str(Path(model).expanduser()) if Path(model).exists() else model)
        except (OSError, ValueError) as error:
            raise ModelNotFound(f"no model {model!r}, nor a shape; shapes are {', '.join(SHAPES)}") from error
    text = config.get_text_config()
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(text)
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    outside = {id(built.get_input_embeddings().weight), id(built.get_output_embeddings().weight)}
    weights = sum(one.numel() for one in built.parameters() if one.dim() > 1 and id(one) not in outside)
    layers = text.num_hidden_layers
    return ModelShape(
        weights=weights,
        head=built.get_output_embeddings().weight.numel(),
        attention=4 * layers * heads * width,
        kv=2 * layers * (text.num_key_value_heads or heads) * width,
    )


def rates_of(gpu: str, *, reached: float = REACHED) -> Rates:
    """Return a GPU's rates by its data sheet.

    Raises:
        QCFuseError: if it is not in the table.
    """
    if gpu.lower() not in SHEETS:
        raise QCFuseError(
            f"no data sheet of {gpu!r}; there are {', '.join(SHEETS)}, and `{HERE}` measures this machine"
        )
    flops, memory, link = (rate * reached for rate in SHEETS[gpu.lower()])
    tiers = {"device": memory / 2, "host memory": link, "NVMe": NVME * reached, "network": NETWORK * reached}
    return Rates(flops, tiers, f"data sheet x {reached:g}, an assumption and not a measurement")


def rates_here() -> Rates:
    """Measure this machine with the smallest shape; a disk and a network are taken as in the table."""
    from qcfuse_rag.evaluation.speed.ceilings import measure_ceilings
    from qcfuse_rag.evaluation.speed.shapes import random_model

    lm = random_model("smollm2-135m")
    found = measure_ceilings(lm)
    tiers = {"memory": found.loading, "NVMe": NVME * REACHED, "network": NETWORK * REACHED}
    kind = torch.cuda.get_device_name() if lm.device.type == "cuda" else f"{torch.get_num_threads()} threads of a CPU"
    return Rates(found.flops, tiers, f"operations and memory measured here, {kind}; NVMe and network assumed")
