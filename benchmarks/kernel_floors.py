"""Times of the kernels on this GPU beside torch's times and lower bounds from arithmetic and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any
from unittest import mock

import torch
import triton
from torch import Tensor
from typer import Option

from benchmarks.floors import SHAPES, Ceilings, measure_ceilings
from benchmarks.runner import Report, Run, Table, about_process
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.models.rope import KVShape, LayerRope
from qcfuse_rag.runtime.attention import dispatch
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.kernels import context_score, sparse_attention
from qcfuse_rag.runtime.kernels.placement import PlacementBlock, place_blocks, place_blocks_reference
from qcfuse_rag.runtime.kernels.support import supports_kernels
from qcfuse_rag.runtime.kernels.table_attention import table_attention
from qcfuse_rag.runtime.kv_table import KVTable
from qcfuse_rag.runtime.reference_attention import plain_attention_weights
from qcfuse_rag.runtime.rows import AttentionParams, RowsPlan, StepPlan
from qcfuse_rag.store.quantization import LOSSLESS, quantize

QUESTION_ROWS, CHUNK, REQUESTS = 32, 512, (1, 8)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One piece of work of a kernel, beside the same work in torch.

    `operations` counts its floating-point operations, and `nbytes` the bytes that it must read and write. `recorded`
    kernels are also replayed from a CUDA graph.
    """

    name: str
    kernel: Callable[..., Tensor]
    plain: Callable[[], Tensor]
    operations: float
    nbytes: float
    recorded: bool = True


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The sizes of a model's layers, and random tensors of its dtype."""

    heads: int
    kv_heads: int
    dim: int
    layers: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> LayerSizes:
        """Read the sizes from a model's configuration."""
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        dim = int(config.get("head_dim") or hidden // heads)
        kv_heads, layers = int(config["num_key_value_heads"]), int(config["num_hidden_layers"])
        return cls(heads, kv_heads, dim, layers, dtype, device)

    def random(self, *shape: int) -> Tensor:
        """Return a tensor of random numbers."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the measurement."""

    shape: Annotated[str, Option(help=f"Model shape: {', '.join(SHAPES)}.")] = "qwen3-8b"
    tokens: Annotated[int, Option(help="Tokens of the prompt.")] = 10240
    rows: Annotated[int, Option(help="Rows that are recomputed.")] = 1024


def measure(options: Options, run: Run) -> None:
    """Time the kernels on this GPU beside torch, and beside lower bounds from arithmetic and bytes.

    Times are medians of Triton's `do_bench`, which empties the cache before each call. They have the host's time in
    them; attention is also replayed from a CUDA graph, which shows the device's alone.
    """
    if options.shape not in SHAPES:
        raise QCFuseError(f"there is no shape {options.shape!r}; there are {', '.join(SHAPES)}")
    if not QUESTION_ROWS <= options.rows < options.tokens:
        raise QCFuseError(f"--rows must be {QUESTION_ROWS} or more, and fewer than --tokens")
    if not torch.cuda.is_available():
        raise QCFuseError("kernels run on a CUDA device; there is none here")
    device = {"device": torch.cuda.get_device_name(), "triton": triton.__version__}
    run.begin({**about_process(), **device}, {**device, **asdict(options)})
    ceilings = measure_ceilings(torch.device("cuda"), torch.bfloat16)
    sizes = LayerSizes.of(SHAPES[options.shape], torch.bfloat16, torch.device("cuda"))
    with torch.inference_mode():
        for case in cases(sizes, options.tokens, options.rows):
            if (case.name,) not in run.records:
                try:
                    row = _measure(case, ceilings)
                except Exception as error:  # the following cases are still measured
                    row = {"refusal": f"{type(error).__name__}: {error}"}
                run.add((case.name,), row)


def report(run: Run) -> Report:
    """Return the times of each case."""
    rows = [{"case": str(name), **record} for (name,), record in run.records.items()]
    columns = ("case", "kernel ms", "on the device", "torch ms", "times as fast", "floor ms", "of the floor")
    return Report({"cases": rows}, [Table(f"kernels on {run.about['device']}", columns, list(map(_cells, rows)))])


def _cells(row: dict[str, Any]) -> list[str]:
    if "refusal" in row:
        return [row["case"], row["refusal"], *[""] * 5]
    device_ms, floor_ms = row["device_ms"], row["floor_ms"]
    return [
        row["case"],
        f"{row['kernel_ms']:.3f}",
        "" if device_ms is None else f"{device_ms:.3f}",
        f"{row['torch_ms']:.3f}",
        f"{row['torch_ms'] / row['kernel_ms']:.1f}",
        f"{floor_ms:.3f}",
        f"{floor_ms / (device_ms or row['kernel_ms']):.2f}",
    ]


def cases(sizes: LayerSizes, tokens: int, n_rows: int) -> Iterator[KernelCase]:
    """Yield the kernels' work in one layer for a fused prompt, in decode steps, and in placing its chunks."""
    device, size = sizes.device, sizes.dtype.itemsize
    heads, kv_heads, dim = sizes.heads, sizes.kv_heads, sizes.dim
    params = AttentionParams(dim**-0.5)
    key, value = sizes.random(1, kv_heads, tokens, dim), sizes.random(1, kv_heads, tokens, dim)
    question = torch.arange(tokens - QUESTION_ROWS, tokens, device=device)
    others = torch.randperm(tokens - QUESTION_ROWS, device=device)[: n_rows - QUESTION_ROWS].sort().values
    for name, rows in (("rows", torch.cat([others, question])), ("question", question)):
        query = sizes.random(1, heads, len(rows), dim)
        yield KernelCase(
            f"attention: {len(rows)} {name}",
            partial(sparse_attention.sparse_attention, query, key, value, rows, params),
            partial(_attend_in_torch, query, key, value, RowsPlan.of(rows), params),
            4.0 * dim * heads * float((rows + 1).sum()),
            size * (key.numel() + value.numel() + 2 * query.numel()),
        )
    known = torch.ones(tokens, dtype=torch.bool, device=device)
    yield KernelCase(
        f"context score: {QUESTION_ROWS} question",
        partial(context_score.context_scores, query, key, question, known, params),
        partial(plain_attention_weights, query, key, question, known, params),
        4.0 * dim * heads * float((question + 1).sum()),
        size * (2 * key.numel() + query.numel()),
    )
    for requests in REQUESTS:
        buffers = [KVBuffer((key.clone(),), (value.clone(),)) for _ in range(requests)]
        table = KVTable.of(buffers, (KVShape(kv_heads, dim, dim),), tokens)
        query = sizes.random(requests, heads, 1, dim)
        positions = torch.full((requests, 1), tokens - 1, device=device)
        plan = StepPlan(buffers, positions, (tokens - 1,) * requests, (None,))
        yield KernelCase(
            f"attention: decode step of {requests}",
            partial(table_attention, query, table, 0, positions, params),
            partial(_attend_in_torch, query, query, query, plan, params),
            4.0 * dim * heads * tokens * requests,
            size * requests * (key.numel() + value.numel()),
        )
    for kv_dtype in (LOSSLESS, "int8"):
        blocks = _blocks(sizes, tokens, kv_dtype)
        yield KernelCase(
            f"place: {len(blocks):,} blocks, {kv_dtype}",
            partial(_place, place_blocks, blocks),
            partial(_place, place_blocks_reference, blocks),
            0.0,
            sum(part.nbytes for block in blocks for part in (block.stored, block.scale) if part is not None)
            + sum(block.stored.numel() * size for block in blocks),
            recorded=False,
        )


def _blocks(sizes: LayerSizes, tokens: int, kv_dtype: str) -> list[PlacementBlock]:
    """Return the stored blocks of a prompt's chunks in all layers, to be placed into a buffer."""
    rope = LayerRope(10000.0 ** -(torch.arange(0, sizes.dim, 2, device=sizes.device) / sizes.dim))
    shapes = (KVShape(sizes.kv_heads, sizes.dim, sizes.dim),) * sizes.layers
    buffer = KVBuffer.allocate(shapes, tokens, dtype=sizes.dtype, device=sizes.device)
    blocks = []
    for start in range(0, tokens - CHUNK + 1, CHUNK):
        for keys, values in zip(buffer.keys, buffer.values, strict=True):
            for target, rotation, over in ((keys, rope, 0), (values, None, 2)):
                stored = sizes.random(CHUNK, sizes.kv_heads, sizes.dim)
                block, scale = (stored, None) if kv_dtype == LOSSLESS else quantize(stored, over=over)
                blocks.append(PlacementBlock(block, scale, target, start, rotation))
    return blocks


def _place(place: Callable[[list[PlacementBlock]], None], blocks: list[PlacementBlock]) -> Tensor:
    place(blocks)
    return blocks[0].into[:, :, :CHUNK]


def _attend_in_torch(
    query: Tensor, key: Tensor, value: Tensor, plan: RowsPlan | StepPlan, params: AttentionParams
) -> Tensor:
    """Attend as the engine does; inside `without_kernels` that is torch's attention."""
    layer: Any = SimpleNamespace(layer_idx=0)
    out, _ = dispatch.rows_attention(layer, query, key, value, None, params.scaling, fusion=plan, sliding_window=None)
    return out


def without_kernels() -> AbstractContextManager[object]:
    """Make the engine attend in torch."""
    return mock.patch.object(dispatch, supports_kernels.__name__, new=_never)


def _never(*_: Tensor) -> bool:  # a mock object would take as long as the timed call
    return False


def _measure(case: KernelCase, ceilings: Ceilings) -> dict[str, Any]:
    row = {
        "floor_ms": 1e3 * max(case.operations / ceilings.flops, case.nbytes / ceilings.memory),
        "kernel_ms": _milliseconds(case.kernel),
        "device_ms": _device_milliseconds(case.kernel) if case.recorded else None,
    }
    with without_kernels():
        return {**row, "torch_ms": _milliseconds(case.plain)}


def _milliseconds(call: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(call, warmup=25, rep=100, return_mode="median"))


def _device_milliseconds(call: Callable[[], object]) -> float:
    """Return the median of the device's time of a call, without the host's."""
    call()  # compile before recording
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return _milliseconds(graph.replay)
