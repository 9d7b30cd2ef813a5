"""The benchmark of the store measures all that it says, on the same bytes, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from qcfuse_rag.evaluation.speed.store import COLD, WRITE, EntryShape, measure_store

SHAPE = EntryShape(layers=2, heads=2, channels=16, tokens=200, dtype=torch.bfloat16)


def test_every_side_is_measured_with_every_number_of_threads(tmp_path: Path) -> None:
    found = measure_store(tmp_path, megabytes=1, repeats=2, threads=(1, 3), shapes=(SHAPE,))
    assert {one.threads for one in found.rates} == {1, 3}
    assert len({one.what for one in found.rates}) == (4 if COLD in {one.what for one in found.rates} else 2)
    for one in found.rates:
        assert one.entries * one.entry_bytes > 900_000
        assert min(one.store_mb_s, one.bare_mb_s, one.ratio) > 0
        assert (one.recycled_ratio is None) == (one.what == WRITE)
    assert list(tmp_path.iterdir()) == []


def test_it_can_be_printed_both_ways(tmp_path: Path) -> None:
    found = measure_store(tmp_path, megabytes=1, repeats=1, threads=(1,), shapes=(SHAPE,))
    assert len(json.loads(json.dumps(found.to_dict()))["rates"]) == found.table().row_count
