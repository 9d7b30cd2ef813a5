"""What kernels take on this GPU, beside what torch takes for the same and what arithmetic and bytes allow.

    python benchmarks/kernel_floors.py [--shape qwen3-8b] [--tokens 10240] [--rows 1024] [--tiles] [--json]

Medians of Triton's `do_bench`, which empties the cache before each call. Both sides are timed as they are called: what
the host takes shows as far as it is longer than emptying the cache. Kernels that score are also replayed from a CUDA
graph, as are those that multiply: what the device takes, and how near that comes to the floor. The floor is the longer
of two times: operations at the rate of a large matrix product, bytes at that of a large copy, both measured here. With
`--tiles` both are timed with other tiles and strips too, from which `runtime.kernels.launch` and `product` may have to
choose anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.nn import functional

from qcfuse_rag.cli.console import quiet_libraries
from qcfuse_rag.evaluation.speed.ceilings import measure_ceilings
from qcfuse_rag.evaluation.speed.shapes import SHAPES, random_model
from qcfuse_rag.models.rope import KVShape, LayerRope
from qcfuse_rag.runtime.attention import dispatch as torch_attention
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.fused_layers.pointwise import Norm
from qcfuse_rag.runtime.fused_layers.product import STRIPS, Strip, gate_projected, projected
from qcfuse_rag.runtime.kernels import context_score
from qcfuse_rag.runtime.kernels import sparse_attention as attention
from qcfuse_rag.runtime.kernels.context_score import context_scores
from qcfuse_rag.runtime.kernels.launch import TALL, Tile, tile_of
from qcfuse_rag.runtime.kernels.paged_attention import table_attention
from qcfuse_rag.runtime.kernels.placement import Block, place_blocks, place_blocks_reference
from qcfuse_rag.runtime.kernels.sparse_attention import attention_tile, sparse_attention
from qcfuse_rag.runtime.kv_table import KVTable
from qcfuse_rag.runtime.reference_attention import plain_attention_weights
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.runtime.step_plan import StepPlan
from qcfuse_rag.store.quantization import quantize
from qcfuse_rag.store.quantization import LOSSLESS

QUESTION_ROWS, CHUNK, REQUESTS = 32, 512, (1, 8)


@dataclass(frozen=True, slots=True)
class Case:
    """Something a kernel does.

    Attributes:
        name: what.
        kernel: does it.
        plain: does it in torch.
        operations: floating-point operations it takes.
        nbytes: bytes it reads and writes at least.
        tile: it goes by, or strip, if it does.
    """

    name: str
    kernel: Callable[..., Tensor]
    plain: Callable[[], Tensor]
    operations: float
    nbytes: float
    tile: Tile | Strip | None


def cases(
    sizes: Mapping[str, Any], tokens: int, n_rows: int, dtype: torch.dtype, device: torch.device
) -> Iterator[Case]:
    """Yield what fusing a prompt of so many tokens has kernels do in one layer, and the placing of its chunks.

    Args:
        sizes: of a model, as in its configuration.
        tokens: of the prompt.
        n_rows: to recompute, the question's among them.
        dtype: of keys and values.
        device: where.
    """
    heads, layers = int(sizes["num_attention_heads"]), int(sizes["num_hidden_layers"])
    kv_heads, dim = int(sizes["num_key_value_heads"]), int(sizes.get("head_dim") or sizes["hidden_size"] // heads)
    how, size = {"scaling": dim**-0.5}, dtype.itemsize

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    key, value = random(1, kv_heads, tokens, dim), random(1, kv_heads, tokens, dim)
    asking = torch.arange(tokens - QUESTION_ROWS, tokens, device=device)
    others = torch.randperm(tokens - QUESTION_ROWS, device=device)[: n_rows - QUESTION_ROWS].sort().values
    for name, rows in (("rows", torch.cat([others, asking])), ("question", asking)):
        query = random(1, heads, len(rows), dim)
        yield Case(
            f"attention: {len(rows)} {name}",
            partial(sparse_attention, query, key, value, rows, **how),
            partial(_in_torch, query, key, value, RowsPlan.of(rows), **how),
            4.0 * dim * heads * float((rows + 1).sum()),
            size * (key.numel() + value.numel() + 2 * query.numel()),
            attention_tile(dtype, dim, len(rows) * heads // kv_heads, kv_heads, device),
        )
    known = torch.ones(tokens, dtype=torch.bool, device=device)
    yield Case(
        f"context score: {QUESTION_ROWS} question",
        partial(context_scores, query, key, asking, known, **how),
        partial(plain_attention_weights, query, key, asking, known, **how),
        4.0 * dim * heads * float((asking + 1).sum()),
        size * (2 * key.numel() + query.numel()),
        tile_of(dtype, dim, QUESTION_ROWS * heads // kv_heads),
    )
    for requests in REQUESTS:
        buffers = [KVBuffer((key.clone(),), (value.clone(),)) for _ in range(requests)]
        table = KVTable.of(buffers, (KVShape(kv_heads, dim, dim),), tokens)
        query, at = random(requests, heads, 1, dim), torch.full((requests, 1), tokens - 1, device=device)
        plan = StepPlan(buffers, at, (tokens - 1,) * requests, (None,))
        yield Case(
            f"attention: decode step of {requests}",
            partial(table_attention, query, table, 0, at, **how),
            partial(_in_torch, query, query, query, plan, **how),
            4.0 * dim * heads * tokens * requests,
            size * requests * (key.numel() + value.numel()),
            attention_tile(dtype, dim, heads // kv_heads, kv_heads, device),
        )
    yield from products(sizes, random)
    rope = LayerRope(10000.0 ** -(torch.arange(0, dim, 2, device=device) / dim))
    for numbers in (LOSSLESS, "int8"):
        buffer = KVBuffer.allocate((KVShape(kv_heads, dim, dim),) * layers, tokens, dtype=dtype, device=device)
        blocks = []
        for start in range(0, tokens - CHUNK + 1, CHUNK):
            for sides in zip(buffer.keys, buffer.values, strict=True):
                for into, turned, over in zip(sides, (rope, None), (0, 2), strict=True):
                    stored = random(CHUNK, kv_heads, dim)
                    block, scale = (stored, None) if numbers == LOSSLESS else quantize(stored, numbers, over=over)
                    blocks.append(Block(block, scale, into, start, turned))
        yield Case(
            f"place: {len(blocks):,} blocks, {numbers}",
            partial(_placed, place_blocks, blocks),
            partial(_placed, place_blocks_reference, blocks),
            0.0,
            sum(block.nbytes + block.stored.numel() * size for block in blocks),
            None,
        )


def products(sizes: Mapping[str, Any], random: Callable[..., Tensor]) -> Iterator[Case]:
    """Yield the products of a layer's weights in decode steps, each with what is computed before and after it.

    Args:
        sizes: of a model, as in its configuration.
        random: makes tensors.
    """
    hidden, inner, heads = (int(sizes[name]) for name in ("hidden_size", "intermediate_size", "num_attention_heads"))
    dim, kv_heads = int(sizes.get("head_dim") or hidden // heads), int(sizes["num_key_value_heads"])
    asking = [random(count * dim, hidden) for count in (heads, kv_heads, kv_heads)]
    back, gates, values, down = (
        random(*shape) for shape in ((hidden, heads * dim), (inner, hidden), (inner, hidden), (hidden, inner))
    )
    norm = Norm(random(hidden), 1e-6)
    for n_rows in REQUESTS:
        x, attended, opened = (random(n_rows, 1, width) for width in (hidden, heads * dim, inner))
        several = partial(projected, x, asking, norm=norm), partial(_normed, x, norm, asking)
        added = partial(projected, attended, [back], residual=x), partial(_added, attended, back, x)
        gated = partial(gate_projected, x, gates, values, "silu", norm=norm), partial(_gated, x, norm, gates, values)
        last = partial(projected, opened, [down], residual=x), partial(_added, opened, down, x)
        for name, calls, weights in (
            ("queries, keys and values", several, asking),
            ("output", added, [back]),
            ("gates", gated, [gates, values]),
            ("down", last, [down]),
        ):
            elements = float(sum(weight.numel() for weight in weights))
            nbytes = elements * x.itemsize
            yield Case(f"product: {name}, {n_rows} rows", *calls, 2 * n_rows * elements, nbytes, STRIPS[0])


def _normed(x: Tensor, norm: Norm, weights: list[Tensor]) -> Tensor:
    normed = functional.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
    return torch.cat([functional.linear(normed, weight) for weight in weights], -1)


def _added(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    return functional.linear(x, weight) + residual


def _gated(x: Tensor, norm: Norm, gates: Tensor, values: Tensor) -> Tensor:
    gate, value = _normed(x, norm, [gates, values]).chunk(2, -1)
    return functional.silu(gate) * value


def _placed(place: Callable[[list[Block]], None], blocks: list[Block]) -> Tensor:
    place(blocks)
    return blocks[0].into[:, :, :CHUNK]


def _in_torch(query: Tensor, key: Tensor, value: Tensor, plan: RowsPlan | StepPlan, *, scaling: float) -> Tensor:
    """Attend as the engine does, which is without kernels while `without_kernels`."""
    layer: Any = SimpleNamespace(layer_idx=0)
    out, _ = torch_attention.rows_attention(layer, query, key, value, None, scaling, fusion=plan, sliding_window=None)
    return out


def without_kernels() -> AbstractContextManager[object]:
    """Have torch attend."""
    return mock.patch.object(torch_attention, "kernels_take", new=_never)


def _never(*_: Tensor) -> bool:  # a mock would take as long as what is timed
    return False


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median of what a call takes."""
    return float(triton.testing.do_bench(call, warmup=25, rep=100, return_mode="median"))


def on_device(call: Callable[[], object]) -> float:
    """Return the median of what the device takes for a call."""
    call()  # what is compiled is compiled before it is recorded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return milliseconds(graph.replay)


def others(tile: Tile | Strip) -> list[Tile] | list[Strip]:
    """Return tiles or strips to try instead of one."""
    if isinstance(tile, Strip):
        deep, wide = STRIPS
        more = (replace(deep, stages=6), replace(deep, warps=2), Strip(16, 512, stages=3), replace(wide, stages=6))
        return [one for one in (*STRIPS, *more, Strip(32, 256), Strip(64, 64)) if one != tile]
    low = replace(TALL, keys=64)
    tall = (TALL, replace(TALL, stages=3), low, replace(low, stages=3), replace(low, warps=4), Tile(64, 64))
    wider = replace(tile, keys=2 * tile.keys)
    tried = tall if tile == TALL else (replace(tile, stages=3), wider, replace(wider, stages=3), low, TALL)
    return [one for one in tried if one != tile]


def with_tile(call: Callable[..., object], tile: Tile | Strip) -> dict[str, Any]:
    """Return what a call takes with a tile or strip, or why it cannot be had."""
    with ExitStack() as patches:
        if isinstance(tile, Strip):
            call = partial(call, strip=tile)
        for home, name in ((attention, "attention_tile"), (context_score, "tile_of")):
            patches.enter_context(mock.patch.object(home, name, return_value=tile))
        try:
            return {"tile": str(tile), "ms": on_device(call), "refusal": None}
        except Exception as error:  # a compiler has many ways to refuse, and what was measured before is not to be lost
            return {"tile": str(tile), "ms": None, "refusal": f"{type(error).__name__}: {error}"[:200]}


def measure(case: Case, flops: float, memory: float, *, tiles: bool) -> dict[str, Any]:
    """Return what a case takes, as plain data."""
    floor = 1e3 * max(case.operations / flops, case.nbytes / memory)
    found: dict[str, Any] = {"case": case.name, "floor_ms": floor, "kernel_ms": milliseconds(case.kernel)}
    with without_kernels():
        found["torch_ms"] = milliseconds(case.plain)
    tried = [] if case.tile is None else [case.tile, *(others(case.tile) if tiles else ())]
    return {**found, "tiles": [with_tile(case.kernel, one) for one in tried]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=10240)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if not QUESTION_ROWS <= given.rows < given.tokens:
        parser.error(f"there must be {QUESTION_ROWS} rows at least, and fewer than tokens")
    if not torch.cuda.is_available():
        sys.exit("kernels run on a CUDA device; there is none here")
    quiet_libraries()
    ceilings = measure_ceilings(random_model("smollm2-135m", dtype="bfloat16"))  # of the device: any model will do
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for case in cases(SHAPES[given.shape], given.tokens, given.rows, torch.bfloat16, torch.device("cuda")):
            try:
                rows.append(measure(case, ceilings.flops, ceilings.memory, tiles=given.tiles))
            except Exception as error:  # the cases after it are not to be lost
                rows.append({"case": case.name, "refusal": f"{type(error).__name__}: {error}"})
            print(said(rows[-1]), file=sys.stderr if given.json else sys.stdout, flush=True)
    if given.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        print(json.dumps({**about, **vars(given), "cases": rows}, indent=1))


def said(row: dict[str, Any]) -> str:
    """Return what was measured of a case in words; what the device takes, by tiles, in lines of their own."""
    if "refusal" in row:
        return f"{row['case']}: {row['refusal']}"
    called, floor, plain = (row[name] for name in ("kernel_ms", "floor_ms", "torch_ms"))
    ratio = plain / called
    first = f"{row['case']}: {called:.3f} ms, torch {plain:.3f} ms, {ratio:.1f} times as fast; floor {floor:.3f} ms"
    lines = [
        f"  {one['tile']}: {one['refusal'] or format(one['ms'], '.3f') + ' ms, ' + format(floor / one['ms'], '.2f')}"
        for one in row["tiles"]
    ]
    return "\n".join([first, *lines])


if __name__ == "__main__":
    main()
