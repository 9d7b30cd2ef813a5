"""`qcfuse bench`, on little: what it prints is made of what it measured."""

from __future__ import annotations

from pathlib import Path

import torch

from qcfuse_rag.evaluation.speed.store import EntryShape, measure_store
from tests.support.cli import Run


def test_the_store_is_measured_beside_bare_files(tmp_path: Path) -> None:
    shape = EntryShape(layers=2, heads=2, channels=16, tokens=200, dtype=torch.float32)
    found = measure_store(tmp_path, megabytes=1, repeats=2, threads=(1, 2), shapes=[shape])
    assert {rate.threads for rate in found.rates} == {1, 2}
    assert len({rate.what for rate in found.rates}) >= 2
    assert all(rate.store_mb_s > 0 and rate.bare_mb_s > 0 and rate.ratio > 0 for rate in found.rates)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    assert found.table().row_count == len(found.rates)


def test_a_warming_job_is_measured_beside_its_forward_passes(run: Run, model_folder: str) -> None:
    options = ("--model", model_folder, "--device", "cpu", "--chunks", 3, "--repeats", 2)
    found = run.json("bench", "warm", *options)
    assert (found["chunks"], len(found["job_s"]), len(found["bare_s"])) == (3, 2, 2)
    assert found["computed_share"] >= 1
    assert "warming job" in run.text("bench", "warm", *options)
