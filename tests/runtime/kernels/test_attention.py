"""Attention of sparse rows of one request and of several, each with its own buffer, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.kernels import launch
from qcfuse_rag.runtime.kernels import sparse_attention as attention
from qcfuse_rag.runtime.kernels import split_k as parts
from qcfuse_rag.runtime.kernels.context_score import context_scores
from qcfuse_rag.runtime.kernels.sparse_attention import sparse_attention, sparse_attention_reference
from qcfuse_rag.runtime.kernels.table_attention import append_rows, table_attention, table_attention_reference
from qcfuse_rag.runtime.kv_table import KVTable
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
ONE_EACH = [[0], [130], [64], [3]]
SEVERAL_EACH = [[2, 70, 71, 200, 201], [0, 1, 2, 3, 4], [10, 64, 128, 192, 192]]


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [None, 4])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim"),
    [(4, 4, 64, 64), (8, 2, 64, 64), (14, 2, 80, 48), (2, 1, 256, 256), (35, 1, 32, 32)],
)
@pytest.mark.parametrize("rows", [ONE_EACH, SEVERAL_EACH], ids=["one row", "several rows"])
def test_rows_attend_to_their_own_requests_buffer(
    rows: list[list[int]], heads: int, kv_heads: int, dim: int, value_dim: int, splits: int | None, dtype: torch.dtype
) -> None:
    query, buffers, table, at = tabled(rows, heads, kv_heads, dim, value_dim, dtype)
    for layer in range(2):
        result = table_attention(query, table, layer, at, AttentionParams(0.2), splits=splits)
        expected = table_attention_reference(query, buffers, layer, at, AttentionParams(0.2))
        assert result.shape == expected.shape == (*at.shape, heads, value_dim)
        assert result.dtype == dtype
        assert relative_error(result, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(None, 3.0), (1, None), (37, 3.0), (1000, None)])
def test_rows_of_several_requests_with_windows_caps_and_sinks(
    splits: int, sinks: bool, window: int | None, softcap: float | None
) -> None:
    query, buffers, table, rows = tabled([[5, 300, 399], [18, 19, 20], [0, 1, 128]], 6, 2, 64, 32, torch.float32)
    params = AttentionParams(0.3, softcap, window, torch.randn(6).to(DEVICE) if sinks else None)
    result = table_attention(query, table, 1, rows, params, splits=splits)
    assert relative_error(result, table_attention_reference(query, buffers, 1, rows, params)) < 1e-5


@pytest.mark.parametrize("rows", [[[7], [0], [30]], [[1, 2, 7], [0, 3, 5], [9, 30, 30]]], ids=["one row", "several"])
def test_rows_are_written_at_their_positions_and_nowhere_else(rows: list[list[int]]) -> None:
    _, buffers, table, at = tabled(rows, 4, 2, 64, 48, torch.float16)
    before = [[tensor.clone() for tensor in (*buffer.keys, *buffer.values)] for buffer in buffers]
    key, value = (torch.randn(3, len(rows[0]), 2, dim).to(DEVICE, torch.float16).transpose(1, 2) for dim in (64, 48))
    if rows[2] == [9, 30, 30]:
        key[2, :, 2], value[2, :, 2] = key[2, :, 1], value[2, :, 1]
    append_rows(key, value, table, 1, at)
    for index, (positions, buffer) in enumerate(zip(rows, buffers, strict=True)):
        assert torch.equal(buffer.keys[1][0, :, positions], key[index])
        assert torch.equal(buffer.values[1][0, :, positions], value[index])
        for tensor, old in zip((*buffer.keys, *buffer.values), before[index], strict=True):
            layer = 1 if tensor is buffer.keys[1] or tensor is buffer.values[1] else 0
            if layer == 1:
                tensor[:, :, positions], old[:, :, positions] = 0, 0
            assert torch.allclose(tensor, old, rtol=0, atol=0, equal_nan=True)


def test_a_buffer_of_another_layout_has_no_table() -> None:
    _, [buffer], table, _ = tabled([[7]], 4, 2, 64, 64, torch.float32)
    apart = KVBuffer(tuple(tensor.transpose(1, 2) for tensor in buffer.keys), buffer.values)
    with pytest.raises(ValueError, match="must be contiguous"):
        KVTable.of([apart], table.shapes, 8)


EVEN = [(16, 10_240, 16), (1, 100_000, 128), (2, 32_768, 128), (1, 600, 2), (1, 100, 1), (300, 100_000, 1)]
UNEVEN = [(24, 22), (120, 4), (256, 2), (320, 2), (384, 1), (512, 1)]


@pytest.mark.parametrize(
    ("programs", "keys", "splits", "uneven"),
    [*((*case, False) for case in EVEN), *((programs, 10_240, splits, True) for programs, splits in UNEVEN)],
)
def test_keys_are_split_until_programs_fill_the_device(
    programs: int, keys: int, splits: int, uneven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uneven programs are twice as many as run at once."""
    monkeypatch.setattr(parts, "concurrent_programs", lambda device: 264)
    assert parts.num_splits(programs, keys, DEVICE, uneven=uneven) == splits
    assert parts.num_splits(programs, 512, DEVICE, uneven=uneven) <= 2


@pytest.mark.parametrize("splits", [parts.TWO_SPLITS, 3, parts.FEW_SPLITS, parts.FEW_SPLITS + 1, parts.MAX_SPLITS])
def test_parts_are_combined(splits: int) -> None:
    query, key, value, rows = operands(2, 1, [1500, 2100], 2112, 16, 16, torch.float32)
    result = sparse_attention(query, key, value, rows, AttentionParams(0.3), splits=splits)
    assert relative_error(result, sparse_attention_reference(query, key, value, rows, AttentionParams(0.3))) < 1e-5
