"""The number of parts into which keys are split."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from qcfuse_rag.runtime.kernels import split_k as parts
from qcfuse_rag.runtime.kernels.sparse_attention import sparse_attention, sparse_attention_reference
from qcfuse_rag.runtime.rows import AttentionParams
from tests.runtime.kernels.operands import operands, relative_error
from tests.support.recorders import DEVICE


@pytest.mark.parametrize(
    ("programs", "keys", "splits"),
    [(16, 10_240, 16), (1, 100_000, 128), (2, 32_768, 128), (1, 600, 2), (1, 100, 1), (300, 100_000, 1)],
)
def test_keys_are_split_until_programs_fill_the_device(
    programs: int, keys: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "concurrent_programs", lambda device: 264)
    assert parts.num_splits(programs, keys, DEVICE) == splits


@pytest.mark.parametrize(("programs", "splits"), [(24, 22), (120, 4), (256, 2), (320, 2), (384, 1), (512, 1)])
def test_uneven_programs_are_twice_as_many_as_run_at_once(
    programs: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "concurrent_programs", lambda device: 264)
    assert parts.num_splits(programs, 10_240, DEVICE, uneven=True) == splits
    assert parts.num_splits(programs, 512, DEVICE, uneven=True) <= 2


@pytest.mark.parametrize("splits", [parts.TWO_SPLITS, 3, parts.FEW_SPLITS, parts.FEW_SPLITS + 1, parts.MAX_SPLITS])
def test_parts_are_combined(splits: int) -> None:
    query, key, value, rows = operands(2, 1, [1500, 2100], 2112, 16, 16, torch.float32)
    result = sparse_attention(query, key, value, rows, AttentionParams(0.3), splits=splits)
    assert relative_error(result, sparse_attention_reference(query, key, value, rows, AttentionParams(0.3))) < 1e-5
