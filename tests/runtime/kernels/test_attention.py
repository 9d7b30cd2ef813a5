"""Attention of sparse rows against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from qcfuse_rag.runtime.kernels import launch
from qcfuse_rag.runtime.kernels import sparse_attention as attention
from qcfuse_rag.runtime.kernels.context_score import context_scores
from qcfuse_rag.runtime.kernels.sparse_attention import sparse_attention, sparse_attention_reference
from qcfuse_rag.runtime.kernels.table_attention import append_rows, table_attention, table_attention_reference
from qcfuse_rag.runtime.rows import AttentionParams
from tests.runtime.kernels.operands import DTYPES, TOLERANCE, operands, relative_error, tabled
from tests.support.recorders import DEVICE

SHAPES = {
    "one row": (4, 4, [70], 71, 64, 64),
    "grouped": (8, 2, [0, 3, 4, 90, 150, 199], 200, 64, 64),
    "groups of seven": (14, 2, [*range(40, 60), 130], 131, 64, 64),
    "odd channels": (4, 2, [5, 64, 65], 66, 80, 48),
    "wide": (2, 1, [31, 32, 33, 100], 101, 256, 256),
    "many blocks": (4, 2, list(range(0, 300, 3)), 299, 64, 64),
    "at the edges of blocks": (4, 2, [62, 63, 64, 127, 128, 191], 192, 64, 64),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_that_of_the_reference(shape: str, dtype: torch.dtype) -> None:
    query, key, value, rows = operands(*SHAPES[shape], dtype)
    params = AttentionParams(0.2)
    result = sparse_attention(query, key, value, rows, params)
    assert result.dtype == dtype
    assert relative_error(result, sparse_attention_reference(query, key, value, rows, params)) < TOLERANCE[dtype]


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(None, 3.0), (1, None), (37, None), (37, 3.0), (1000, None)])
def test_attention_with_windows_caps_and_sinks(
    splits: int, sinks: bool, window: int | None, softcap: float | None
) -> None:
    query, key, value, rows = operands(6, 2, [2, 64, 127, 128, 250, 399], 400, 64, 32, torch.float32)
    params = AttentionParams(0.3, softcap, window, torch.randn(6).to(DEVICE) if sinks else None)
    result = sparse_attention(query, key, value, rows, params, splits=splits)
    expected = sparse_attention_reference(query, key, value, rows, params)
    assert relative_error(result, expected) < 1e-5


def test_keys_after_the_last_row_are_not_read() -> None:
    query, key, value, rows = operands(2, 1, [3, 9], 100, 64, 64, torch.float32)
    key[:, :, 10:], value[:, :, 10:] = float("nan"), float("nan")
    result = sparse_attention(query, key, value, rows, AttentionParams(1.0))
    expected = sparse_attention_reference(query, key[:, :, :10], value[:, :, :10], rows, AttentionParams(1.0))
    assert relative_error(result, expected) < 1e-5


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, 4.0)])
def test_the_large_tile_agrees_with_the_reference(
    dtype: torch.dtype, splits: int, window: int | None, softcap: float | None
) -> None:
    """Rows at both ends of the prompt, with keys that all rows of a block see and keys that only some see."""
    rows = [0, 1, 2, *range(120, 400, 3)]
    params = AttentionParams(0.2, softcap, window)
    tensors = operands(4, 2, rows, 400, 64, 64, dtype)
    result = sparse_attention(*tensors, params, tile=launch.LARGE_TILE, splits=splits)
    assert relative_error(result, sparse_attention_reference(*tensors, params)) < TOLERANCE[dtype]
    query, buffers, table, at = tabled([rows, [*range(len(rows))]], 4, 2, 64, 64, dtype, layers=1)
    result = table_attention(query, table, 0, at, params, tile=launch.LARGE_TILE, splits=splits)
    assert relative_error(result, table_attention_reference(query, buffers, 0, at, params)) < TOLERANCE[dtype]


def test_the_large_tile_is_used_for_enough_rows_to_fill_a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = DEVICE
    monkeypatch.setattr(launch, "concurrent_programs", lambda device: 264)
    for supported, rows, expected in ((True, 1024, 128), (True, 800, 128), (True, 760, 64), (False, 1024, 64)):
        monkeypatch.setattr(attention, "supports_large_tile", lambda *_, supported=supported: supported)
        result = attention.attention_tile(torch.bfloat16, 128, 4 * rows, 8, device)
        assert result.rows == expected, "of 32 heads, 8 of keys"


@pytest.mark.parametrize("off", [0.0, 1.0, None], ids=["right", "wrong", "refused"])
def test_the_large_tile_is_used_only_where_its_results_are_right(
    off: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (DEVICE, torch.float16, 64)
    supports_large_tile = attention.supports_large_tile.__wrapped__
    monkeypatch.setattr(attention, "holds_large_tile", lambda device: False)
    assert not supports_large_tile(*asked)
    monkeypatch.setattr(attention, "holds_large_tile", lambda device: True)
    attend, tiles = sparse_attention, []

    def attending(*args: Any, **kwargs: Any) -> Tensor:
        tiles.append(kwargs["tile"])
        if off is None:
            raise RuntimeError("out of shared memory")
        return attend(*args, **kwargs) + off

    monkeypatch.setattr(attention, "sparse_attention", attending)
    assert supports_large_tile(*asked) is (off == 0.0)
    assert set(tiles) == {launch.LARGE_TILE}
    assert not supports_large_tile(asked[0], torch.float32, 64)
    assert not supports_large_tile(asked[0], torch.float16, 256)


def test_operands_that_a_kernel_would_read_wrongly_are_refused() -> None:
    query, key, value, rows = operands(4, 2, [1, 5], 6, 64, 64, torch.float32)
    _, _, table, at = tabled([[1, 5]], 4, 2, 64, 64, torch.float32)
    known, plain, apart = torch.ones(6, dtype=torch.bool, device=DEVICE), AttentionParams(1.0), value.transpose(2, 3)
    for call in (
        lambda: sparse_attention(query, key.double(), value, rows, plain),
        lambda: sparse_attention(query, key, apart, rows, plain),
        lambda: context_scores(query, key.half(), rows, known, plain),
        lambda: table_attention(query[..., ::2], table, 0, at, plain),
        lambda: table_attention(query.half(), table, 0, at, plain),
        lambda: append_rows(key, apart, table, 0, at),
    ):
        with pytest.raises(ValueError, match="channels side by side"):
            call()
