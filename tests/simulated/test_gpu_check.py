"""The script for the first minutes on a GPU runs, as far as it needs none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_the_steps_that_need_no_gpu_run(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "gpu_check.sh", "--dry-run", tmp_path],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    results = json.loads((tmp_path / "check.json").read_text())
    assert results.pop("dry_run")
    ran = {name for name, result in results.items() if "found" in result}
    assert ran == {"versions", "kernels", "recorded", "loading", "prefetching"}
    assert {result["left out"] for name, result in results.items() if name not in ran} == {"it needs a GPU"}
    found = {name: results[name]["found"] for name in ran}
    assert (found["recorded"]["passes, refusal"], found["recorded"]["steps, refusal"]) == (None, None)
    assert found["recorded"]["steps are fused"]
    assert max(found["kernels"]["torch.float32, 16 channels"].values()) < 1e-5
    assert found["loading"]["pinned, int8"]["costs"]["load_s"] > 0
