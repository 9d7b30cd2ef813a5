"""`python -m benchmarks warm`, on little: what it prints is made of what it measured."""

from __future__ import annotations

import pytest

from tests.support.cli import Run


@pytest.mark.slow
def test_a_warming_job_is_measured_beside_its_forward_passes(run: Run, model_folder: str) -> None:
    options = ("--model", model_folder, "--device", "cpu", "--chunks", 3, "--repeats", 2)
    result = run.json("warm", *options)
    assert (result["chunks"], len(result["job_s"]), len(result["bare_s"])) == (3, 2, 2)
    assert result["computed_share"] >= 1
    assert "warming job" in run.text("warm", *options)
