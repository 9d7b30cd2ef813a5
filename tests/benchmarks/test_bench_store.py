"""The benchmark of the store measures all that it says, on the same bytes, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks.__main__ import store_table
from benchmarks.speed.store import COLD, WRITE, EntryShape, measure_store

SHAPE = EntryShape(layers=2, heads=2, channels=16, tokens=200, dtype=torch.bfloat16)


def test_every_side_is_measured_with_every_number_of_threads(tmp_path: Path) -> None:
    result = measure_store(tmp_path, megabytes=1, repeats=2, threads=(1, 3), shapes=(SHAPE,))
    assert {rate["threads"] for rate in result["rates"]} == {1, 3}
    assert len({rate["operation"] for rate in result["rates"]}) == (
        4 if COLD in {rate["operation"] for rate in result["rates"]} else 2
    )
    for rate in result["rates"]:
        assert rate["entries"] * rate["entry_bytes"] > 900_000
        assert min(rate["store_mb_s"], rate["bare_mb_s"], rate["of_bare"]) > 0
        assert (rate["of_recycled"] is None) == (rate["operation"] == WRITE)
    assert list(tmp_path.iterdir()) == []


def test_it_can_be_printed_both_ways(tmp_path: Path) -> None:
    result = measure_store(tmp_path, megabytes=1, repeats=1, threads=(1,), shapes=(SHAPE,))
    assert len(json.loads(json.dumps(result))["rates"]) == store_table(result).row_count
