"""Blocks of neighbouring rows; one block is one masked attention call."""

from __future__ import annotations

from bisect import bisect_right

import torch
from torch import Tensor

from qcfuse_rag.runtime.reference_attention import seen_keys
from qcfuse_rag.runtime.rows import RowBlock, RowsPlan

ROWS_PER_BLOCK = 128


def split_rows(
    rows: Tensor,
    length: int,
    visible: Tensor | None,
    window: int | None,
    rows_on_host: Tensor | None = None,
    visible_on_host: Tensor | None = None,
) -> list[RowBlock]:
    """Split rows into blocks; no block reads keys after the position of its last row.

    Args:
        rows: `[R]` int64 ascending positions.
        length: number of keys.
        visible: `[V]` int64 ascending positions of the keys that may be seen, which key ranges then index into; None
            for all keys.
        window: sliding window in tokens, or None.
        rows_on_host: the rows on the CPU; None copies them, and the host waits for the device.
        visible_on_host: the visible positions on the CPU; likewise.
    """
    if window is not None and window >= length:
        window = None
    if visible is None and window is None and len(rows) == length:
        return [RowBlock(0, length, 0, length, mask=None, causal=True)]
    host_rows = (rows if rows_on_host is None else rows_on_host).tolist()
    keys = range(length) if visible is None else (visible if visible_on_host is None else visible_on_host).tolist()
    positions = torch.arange(length, device=rows.device) if visible is None else visible
    blocks = []
    for start in range(0, len(host_rows), ROWS_PER_BLOCK):
        stop = min(start + ROWS_PER_BLOCK, len(host_rows))
        first_row, last_row = host_rows[start], host_rows[stop - 1]
        stop_key = bisect_right(keys, last_row)
        start_key = 0 if window is None else bisect_right(keys, first_row - window)
        all_seen = keys[stop_key - 1] <= first_row
        all_in_window = window is None or last_row - keys[start_key] < window
        mask = None
        if not all_seen or not all_in_window:
            mask = seen_keys(rows[start:stop], positions[start_key:stop_key], window)
        blocks.append(RowBlock(start, stop, start_key, stop_key, mask, causal=False))
    return blocks


def row_blocks_of(plan: RowsPlan, layer: int, window: int | None) -> list[RowBlock]:
    """Split the rows of a plan; computed once per set of visible keys and window, then shared by layers.

    Args:
        plan: the pass.
        layer: index of the layer.
        window: the layer's sliding window in tokens, or None.
    """
    key = (plan.visible_key(layer), window)
    if key not in plan.row_blocks:
        visible = None if plan.visible is None else plan.visible[layer]
        on_host = None if visible is None else visible.cpu()
        plan.row_blocks[key] = split_rows(plan.rows, plan.length, plan.visible_at(layer), window, plan.on_host, on_host)
    return plan.row_blocks[key]
