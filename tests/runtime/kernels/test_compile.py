"""Every kernel compiles for GPUs that are not present, within their resources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from qcfuse_rag.runtime.fused_layers.pointwise import ACTIVATIONS
from tests.runtime.kernels.compile import LARGE_TILE_ARCHITECTURES, SIZES

ROOT = Path(__file__).parents[3]
SHARED_BYTES, LARGE_TILE_BYTES = 99 << 10, 227 << 10
"""Shared memory of a program: all must fit Ada and Ampere (except the A100), only the large tile may need Hopper."""
SPILLED_BYTES = 128
"""With more, a program spends its time on spilled registers."""
KERNELS = {"attend", "append", "combine", "denominators", "weights_of_keys", "place"}
KERNELS |= {"normalize", "rotate", "gate"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", [80, 89, 90, 100], ids=["Ampere", "Ada", "Hopper", "Blackwell"])
def test_kernels_compile_and_fit(architecture: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.kernels.compile", str(architecture)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["kernel"] for line in lines} == KERNELS
    large = [line for line in lines if line["kernel"] == "attend" and line["warps"] == 8 and line["dim"] <= 128]
    assert bool(large) == (architecture in LARGE_TILE_ARCHITECTURES)
    limits = [(line, LARGE_TILE_BYTES if line in large else SHARED_BYTES) for line in lines]
    assert [line for line, limit in limits if line["shared_bytes"] > limit] == []
    assert [line for line in lines if line["spilled_bytes"] > SPILLED_BYTES] == []
    for kernel, variants in (("gate", len(ACTIVATIONS)), ("append", 1)):  # one row of a request has no wider part
        for name, _, _, dim in SIZES:
            same = [line for line in lines if (line["kernel"], line["dtype"], line["dim"]) == (kernel, name, dim)]
            wide = [line for line in same if line["st_bits"] == [128, 128] and line["ld_bits"][0] == 128]
            assert len(wide) >= min(variants, len(same)), same
