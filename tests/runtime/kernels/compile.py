"""Compile every kernel through its launcher for GPUs that need not be present; print the resources of each.

    TRITON_INTERPRET=0 python -m tests.runtime.kernels.compile 80 90

Prints a line for each kernel that launchers would run: the architecture, its name, dtype and channels, the warps and
bytes of shared memory of a program, the bytes of stack of a thread, to which registers are spilled, and the bits of its
widest and narrowest load from and store to global memory. `early` are the accesses before the program waits for the
results of the kernel before, if it does. Nothing is run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from qcfuse_rag.models.quantized_weights import FORMATS
from qcfuse_rag.models.rope import KVShape, LayerRope
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.fused_layers import skinny_products
from qcfuse_rag.runtime.fused_layers.pointwise import ACTIVATIONS, gated, normalized, rotated
from qcfuse_rag.runtime.fused_layers.skinny_products import DEPTH, MAX_ROWS, gate_projected, projected
from qcfuse_rag.runtime.kernels.context_score import context_scores
from qcfuse_rag.runtime.kernels.launch import DEPENDENT_SINCE, LARGE_TILE, large_tile_fits
from qcfuse_rag.runtime.kernels.placement import PlacementBlock, place_blocks
from qcfuse_rag.runtime.kernels.sparse_attention import sparse_attention
from qcfuse_rag.runtime.kernels.split_k import MAX_SPLITS, TWO_SPLITS, allocate_parts, combine_parts
from qcfuse_rag.runtime.kernels.table_attention import append_rows, table_attention
from qcfuse_rag.runtime.kv_table import KVTable
from qcfuse_rag.runtime.rows import AttentionParams
from qcfuse_rag.store.quantization import LOSSLESS, quantize

LARGE_TILE_ARCHITECTURES = (90, 100)
CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ARCHITECTURES = (80, 89, 90, 100)
SIZES = (
    ("bf16", 32, 8, 128, ARCHITECTURES),
    ("fp16", 9, 3, 64, (89,)),
    ("bf16", 8, 1, 256, (80, 90)),
    ("fp32", 71, 1, 128, (80,)),
    ("fp32", 16, 2, 256, (80,)),
)
"""Dtype, heads, key heads, channels of a head, and the architectures to compile for. The first size is that of most
models. The others are compiled where they came nearest to a limit when all were compiled for all: 256 channels spill on
Ampere and need most shared memory on Hopper, and float32, multiplied in registers, has the same code everywhere."""
DIRECT_ON, SPLIT_ON = 80, 90
"""The architectures to compile attention without a table for, and splitting the keys: both need about as much as
attention by a table with sinks, caps and windows, which is compiled for all."""


class AbsentGPU:
    """The part of a driver that compiling needs."""

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_device(self) -> int:
        return self._target.arch  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def launches(architecture: int) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Yield dtype, channels of a head, and a launching call, as an engine would run them for models of these sizes."""
    for name, heads, kv_heads, dim, architectures in SIZES:
        if architecture not in architectures:
            continue
        dtype, length, is_main = DTYPES[name], 512, architectures == ARCHITECTURES
        query, decode_query = torch.zeros(1, heads, 40, dim, dtype=dtype), torch.zeros(2, heads, 1, dim, dtype=dtype)
        key, fresh = torch.zeros(1, kv_heads, length, dim, dtype=dtype), torch.zeros(2, kv_heads, 1, dim, dtype=dtype)
        rows, known, ends = torch.arange(40), torch.ones(length, dtype=torch.bool), torch.tensor([[3], [9]])
        shapes = (KVShape(kv_heads, dim, dim),)
        buffer = KVBuffer.allocate(shapes, 64, dtype=dtype, device=CPU)
        table = KVTable.of([buffer, buffer], shapes, 64)
        plain = AttentionParams(0.1)
        special = AttentionParams(0.1, softcap=30.0, window=100, sinks=torch.zeros(heads, dtype=dtype))
        several = decode_query.expand(-1, -1, 40, -1), table, 0, rows.expand(2, -1).contiguous()
        for operands in (several, (decode_query, table, 0, ends)):
            yield name, dim, partial(table_attention, *operands, special, splits=1)
        if architecture == DIRECT_ON and dtype != torch.float32:  # which has one tile for any number of rows
            yield name, dim, partial(sparse_attention, query, key, key, rows, special, splits=1)
        if is_main and architecture == SPLIT_ON:
            yield name, dim, partial(table_attention, decode_query, table, 0, ends, plain, splits=2)
        if architecture in LARGE_TILE_ARCHITECTURES and large_tile_fits(dtype, dim):  # two loops without a window
            yield name, dim, partial(table_attention, *several, plain, splits=1, tile=LARGE_TILE)
        if architecture != architectures[0] and not is_main:
            continue  # the other kernels need less than attention
        for splits in (TWO_SPLITS, MAX_SPLITS):
            yield name, dim, partial(combine_parts, *allocate_parts(query, splits), query)
        for splits in (1, 3) if is_main and architecture == SPLIT_ON else (3,):
            yield name, dim, partial(context_scores, query, key, rows, known, special, splits=splits)
        for keys, at in ((fresh, ends), (fresh.expand(-1, -1, 40, -1), rows.expand(2, -1).contiguous())):
            yield name, dim, partial(append_rows, keys, keys, table, 0, at)
        for channels in (dim, 8192):
            yield name, dim, partial(normalized, torch.zeros(40, channels, dtype=dtype), query[0, 0, 0], 1e-6)
        yield name, dim, partial(rotated, query, key[:, :, :40], query[:, 0], query[:, 0])
        for activation in ACTIVATIONS:
            yield name, dim, partial(gated, query, query, activation)
        if dtype != torch.float32:
            plain_linear = partial(nn.Linear, 256, 96, dtype=dtype)
            held = [plain_linear(), FORMATS["int8_weight_only"].quantize(plain_linear(), CPU)]
            for n_rows, linear in product((1, MAX_ROWS), held):
                few, weight = torch.zeros(n_rows, 256, dtype=dtype), linear.weight
                for depth in (DEPTH, 2 * DEPTH) if architecture in LARGE_TILE_ARCHITECTURES else (DEPTH,):
                    multiply = mock.patch.object(skinny_products, "_depth", lambda *_, depth=depth: depth)(projected)
                    yield name, dim, partial(multiply, few, [weight] * 3, [linear.bias] * 3)
                yield name, dim, partial(gate_projected, few, weight, weight, ACTIVATIONS[0])
        rope, stored = LayerRope(torch.ones(dim // 2)), torch.ones(8, kv_heads, dim, dtype=dtype)
        for kv_dtype in (LOSSLESS, "int8") if is_main else ("int8",):
            for turned, over in ((rope, 0), (None, 2)):
                block, scale = (stored, None) if kv_dtype == LOSSLESS else quantize(stored, over=over)
                yield name, dim, partial(place_blocks, [PlacementBlock(block, scale, buffer.keys[0], 3, turned)])


def spilled_bytes(cubin: bytes) -> int:
    """Return the bytes of stack of a thread of a compiled program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return max(map(int, re.findall(r"STACK:(\d+)", usage)))


def access_bits(ptx: str, access: str) -> list[int]:
    """Return the bits of the widest and narrowest accesses (`ld` or `st`) to global memory of a compiled program."""
    found = re.findall(rf"\b{access}\.global\S*?(?:\.v(\d))?\.b(\d+)\b", ptx)
    bits = [int(vector or 1) * int(size) for vector, size in found]
    return [max(bits), min(bits)] if bits else []


def early_accesses(ptx: str) -> list[str] | None:
    """Return the kinds of accesses to global memory before a program waits for inputs; None if it does not wait."""
    before, waits, _ = ptx.partition("griddepcontrol.wait")
    return [access for access in ("ld", "st") if re.search(rf"\b{access}\.global", before)] if waits else None


def main() -> None:
    """Compile and print."""
    compiled: dict[str, tuple[str, Any]] = {}

    def compiling(kernel: JITFunction[Any], grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            if "DEPENDENT" in options and divmod(driver.active.get_current_device(), 10) >= DEPENDENT_SINCE:
                options |= {"DEPENDENT": True, "launch_pdl": True}
            made = kernel.run(*args, grid=grid, warmup=True, **options)
            compiled.setdefault(made.hash, (kernel.__name__, made))

        return launch

    JITFunction.__getitem__ = compiling  # type: ignore[method-assign]
    for architecture in map(int, sys.argv[1:]):
        driver.set_active(AbsentGPU(architecture))
        for name, dim, call in launches(architecture):
            before = set(compiled)
            call()
            for key in compiled.keys() - before:
                kernel, made = compiled[key]
                case = {"architecture": architecture, "kernel": kernel, "dtype": name, "dim": dim}
                resources = {"warps": made.metadata.num_warps, "shared_bytes": made.metadata.shared}
                resources["spilled_bytes"] = spilled_bytes(made.asm["cubin"])
                bits = {f"{access}_bits": access_bits(made.asm["ptx"], access) for access in ("ld", "st")}
                early = early_accesses(made.asm["ptx"])
                print(json.dumps({**case, **resources, **bits, "early": early}), flush=True)


if __name__ == "__main__":
    main()
