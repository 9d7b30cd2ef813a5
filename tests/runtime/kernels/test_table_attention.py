"""Attention of several requests, each with its own buffer, against plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.kernels.table_attention import append_rows, table_attention, table_attention_reference
from qcfuse_rag.runtime.kv_table import KVTable
from qcfuse_rag.runtime.rows import AttentionParams
from tests.runtime.kernels.operands import DTYPES, TOLERANCE, relative_error, tabled
from tests.support.recorders import DEVICE

ONE_EACH = [[0], [130], [64], [3]]
SEVERAL_EACH = [[2, 70, 71, 200, 201], [0, 1, 2, 3, 4], [10, 64, 128, 192, 192]]


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
