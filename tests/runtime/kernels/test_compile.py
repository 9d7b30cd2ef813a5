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

ROOT = Path(__file__).parents[3]
SHARED_BYTES = {4: 99 << 10, 8: 227 << 10}
"""Shared memory of a program by its warps: 4 warps must fit Ada and Ampere (except the A100), 8 must fit Hopper."""
SPILLED_BYTES = 512
"""With more, a program spends its time on spilled registers."""
KERNELS = {"attend", "append", "combine", "denominators", "weights_of_keys", "place"}
KERNELS |= {"normalize", "rotate", "gate"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", [80, 90], ids=["Ampere", "Hopper"])
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
    assert [line for line in lines if line["shared_bytes"] > SHARED_BYTES[line["warps"]]] == []
    attending = {line["warps"] for line in lines if line["kernel"] == "attend"}
    assert attending == ({4, 8} if architecture == 90 else {4})
    assert [line for line in lines if line["spilled_bytes"] > SPILLED_BYTES] == []
