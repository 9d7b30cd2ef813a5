"""Every kernel compiles for GPUs that are not present, within their resources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from qcfuse_rag.runtime.fused_layers.pointwise import ACTIVATIONS
from tests.runtime.kernels.compile import ARCHITECTURES, LARGE_TILE_ARCHITECTURES, SIZES

ROOT = Path(__file__).parents[3]
SHARED_BYTES, LARGE_TILE_BYTES = 99 << 10, 227 << 10
"""Shared memory of a program: all must fit Ada and Ampere (except the A100), only the large tile may need Hopper."""
SPILLED_BYTES = 128
"""With more, a program spends its time on spilled registers."""
KERNELS = {"attend", "append", "combine", "denominators", "weights_of_keys", "place"}
KERNELS |= {"normalize", "rotate", "gate", "project", "project_gated"}
DEPENDENT = {"attend": [], "append": [], "combine": [], "rotate": [], "gate": []}
DEPENDENT |= {"normalize": ["ld"], "project": ["ld"], "project_gated": ["ld"]}
"""Kernels that start before the kernel before has ended, and their accesses before it has: products and norms read
weights."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_compile_and_fit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.kernels.compile", *map(str, ARCHITECTURES)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    names = {(line["architecture"], line["kernel"]) for line in lines}
    assert names == set(product(ARCHITECTURES, KERNELS))
    sizes = {(line["dtype"], line["dim"], line["architecture"]) for line in lines if line["kernel"] == "attend"}
    assert sizes == {(name, dim, architecture) for name, _, _, dim, compiled in SIZES for architecture in compiled}
    large = [line for line in lines if line["kernel"] == "attend" and line["warps"] == 8 and line["dim"] <= 128]
    assert {line["architecture"] for line in large} == set(LARGE_TILE_ARCHITECTURES)
    limits = [(line, LARGE_TILE_BYTES if line in large else SHARED_BYTES) for line in lines]
    assert [line for line, limit in limits if line["shared_bytes"] > limit] == []
    assert [line for line in lines if line["spilled_bytes"] > SPILLED_BYTES] == []
    early = [(line["kernel"], line["early"]) for line in lines if line["architecture"] >= 90]
    assert [(name, found) for name, found in early if found != DEPENDENT.get(name)] == []
    assert [line for line in lines if line["architecture"] < 90 and line["early"] is not None] == []
    kinds = [(*(line[part] for part in ("architecture", "kernel", "dtype", "dim")), line) for line in lines]
    for (name, _, _, dim, compiled), (kernel, variants) in product(SIZES, (("gate", len(ACTIVATIONS)), ("append", 1))):
        for architecture in compiled:  # one row of a request has no wider part
            same = [line for *kind, line in kinds if kind == [architecture, kernel, name, dim]]
            wide = [line for line in same if line["st_bits"] == [128, 128] and line["ld_bits"][0] == 128]
            assert len(wide) >= (variants if compiled == ARCHITECTURES else min(variants, len(same))), same
