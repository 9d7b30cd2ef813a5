"""Every kernel against plain torch: under Triton's interpreter on a CPU, compiled where there is a CUDA device."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import FRAMED, FusionEngine, LanguageModel, MemoryStore, make_method
from qcfuse_rag.store.chunk import ChunkKV, HeldBlocks
from tests.damage import damaged
from tests.families import build_model

pytest.importorskip("triton")

from qcfuse_rag.fuse.assembly import Assembly
from qcfuse_rag.fuse.buffer import KVBuffer
from qcfuse_rag.fuse.kernels import attention, context_score, launch, parts, place, support, table
from qcfuse_rag.fuse.kernels.attention import sparse_attention, sparse_attention_reference
from qcfuse_rag.fuse.kernels.context_score import context_scores
from qcfuse_rag.fuse.kernels.place import Block, place_blocks, place_blocks_reference
from qcfuse_rag.fuse.kernels.support import kernel_refusal
from qcfuse_rag.fuse.kernels.table import append_rows, table_attention, table_attention_reference
from qcfuse_rag.fuse.kv_table import KVTable
from qcfuse_rag.fuse.loading import Loading
from qcfuse_rag.fuse.score import attention_weights
from qcfuse_rag.fuse.step import forward_step
from qcfuse_rag.fuse.transfer import Sent
from qcfuse_rag.generate import warm_up as warming
from qcfuse_rag.model.rope import KVShape, LayerRope
from qcfuse_rag.store.numbers import narrow

PASSAGES = ["The ferry is green, its captain is Orla.", "The paint is kept in the mill.", "Nobody has a key."]
QUESTION = "Who paints?"
"""Short: the interpreter takes its time for every token."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter cannot multiply bfloat16 matrices"),
    ),
]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """`|found - expected| / |expected|`; NaN never passes a comparison."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def operands(
    heads: int, kv_heads: int, rows: list[int], length: int, dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fresh random queries, and keys and values as views into a larger, poisoned buffer."""
    query = torch.randn(1, len(rows), heads, dim).to(DEVICE, dtype).transpose(1, 2)
    buffers = []
    for channels in (dim, value_dim):
        buffer = torch.full((1, kv_heads, length + 13, channels), float("nan"), device=DEVICE, dtype=dtype)
        buffer[:, :, :length] = torch.randn(1, kv_heads, length, channels).to(DEVICE, dtype)
        buffers.append(buffer[:, :, :length])
    return query, buffers[0], buffers[1], torch.tensor(rows, device=DEVICE)


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
    found = sparse_attention(query, key, value, rows, scaling=0.2)
    assert found.dtype == dtype
    assert relative_error(found, sparse_attention_reference(query, key, value, rows, scaling=0.2)) < TOLERANCE[dtype]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, 4.0)])
def test_very_many_rows_are_taken_in_taller_blocks(
    dtype: torch.dtype, splits: int, window: int | None, softcap: float | None
) -> None:
    """The last rows before the first, keys that all rows of a block see before those that some see."""
    rows = [0, 1, 2, *range(120, 400, 3)]
    about: dict[str, Any] = {"scaling": 0.2, "softcap": softcap, "window": window}
    given = operands(4, 2, rows, 400, 64, 64, dtype)
    found = sparse_attention(*given, **about, tile=launch.TALL, splits=splits)
    assert relative_error(found, sparse_attention_reference(*given, **about)) < TOLERANCE[dtype]
    query, buffers, held, at = tabled([rows, [*range(len(rows))]], 4, 2, 64, 64, dtype, layers=1)
    found = table_attention(query, held, 0, at, **about, tile=launch.TALL, splits=splits)
    assert relative_error(found, table_attention_reference(query, buffers, 0, at, **about)) < TOLERANCE[dtype]


def test_rows_fill_a_hopper_gpu_before_they_are_taken_in_taller_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device(DEVICE)
    monkeypatch.setattr(launch, "processors", lambda device: 264)
    for tall, rows, expected in ((True, 1024, 128), (True, 800, 128), (True, 760, 64), (False, 1024, 64)):
        monkeypatch.setattr(attention, "takes_tall", lambda *given, tall=tall: tall)
        found = attention.attention_tile(torch.bfloat16, 128, 4 * rows, 8, device)
        assert found.rows == expected, "of 32 heads, 8 of keys"


@pytest.mark.parametrize("off", [0.0, 1.0, None], ids=["right", "wrong", "refused"])
def test_taller_blocks_are_used_where_they_come_out_right(off: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (torch.device(DEVICE), torch.float16, 64)
    takes_tall = attention.takes_tall.__wrapped__
    monkeypatch.setattr(attention, "is_hopper", lambda device: False)
    assert not takes_tall(*asked)
    monkeypatch.setattr(attention, "is_hopper", lambda device: True)
    attend, tiles = sparse_attention, []

    def attending(*given: Any, **how: Any) -> Tensor:
        tiles.append(how["tile"])
        if off is None:
            raise RuntimeError("out of shared memory")
        return attend(*given, **how) + off

    monkeypatch.setattr(attention, "sparse_attention", attending)
    assert takes_tall(*asked) is (off == 0.0)
    assert set(tiles) == {launch.TALL}
    assert not takes_tall(asked[0], torch.float32, 64)
    assert not takes_tall(asked[0], torch.float16, 256)


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(None, 3.0), (1, None), (37, None), (37, 3.0), (1000, None)])
def test_attention_with_all_that_models_ask_for(
    splits: int, sinks: bool, window: int | None, softcap: float | None
) -> None:
    query, key, value, rows = operands(6, 2, [2, 64, 127, 128, 250, 399], 400, 64, 32, torch.float32)
    about = {"scaling": 0.3, "softcap": softcap, "window": window, "sinks": torch.randn(6) if sinks else None}
    about["sinks"] = about["sinks"].to(DEVICE) if sinks else None  # type: ignore[union-attr]
    found = sparse_attention(query, key, value, rows, splits=splits, **about)  # type: ignore[arg-type]
    expected = sparse_attention_reference(query, key, value, rows, **about)  # type: ignore[arg-type]
    assert relative_error(found, expected) < 1e-5


def tabled(
    rows: list[list[int]], heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype, layers: int = 2
) -> tuple[Tensor, list[KVBuffer], KVTable, Tensor]:
    """Fresh queries of requests of different lengths, whose buffers hold NaN behind each one's last row."""
    shapes, buffers = [KVShape(kv_heads, dim, value_dim)] * layers, []
    ends = [own[-1] + 1 for own in rows]
    for end in ends:
        buffer = KVBuffer.allocate(tuple(shapes), end + 9 * len(buffers), dtype=dtype, device=torch.device(DEVICE))
        for held in (*buffer.keys, *buffer.values):
            held.copy_(torch.randn(held.shape))[:, :, end:] = float("nan")
        buffers.append(buffer)
    query = torch.randn(len(rows), len(rows[0]), heads, dim).to(DEVICE, dtype).transpose(1, 2)
    return query, buffers, KVTable.of(buffers, shapes, max(ends)), torch.tensor(rows, device=DEVICE)


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
    rows: list[list[int]],
    heads: int,
    kv_heads: int,
    dim: int,
    value_dim: int,
    splits: int | None,
    dtype: torch.dtype,
) -> None:
    query, buffers, table, at = tabled(rows, heads, kv_heads, dim, value_dim, dtype)
    for layer in range(2):
        found = table_attention(query, table, layer, at, scaling=0.2, splits=splits)
        expected = table_attention_reference(query, buffers, layer, at, scaling=0.2)
        assert found.shape == expected.shape == (*at.shape, heads, value_dim)
        assert found.dtype == dtype
        assert relative_error(found, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(None, 3.0), (1, None), (37, 3.0), (1000, None)])
def test_rows_of_several_requests_with_all_that_models_ask_for(
    splits: int, sinks: bool, window: int | None, softcap: float | None
) -> None:
    query, buffers, table, rows = tabled([[5, 300, 399], [18, 19, 20], [0, 1, 128]], 6, 2, 64, 32, torch.float32)
    about: dict[str, Any] = {"scaling": 0.3, "softcap": softcap, "window": window}
    about["sinks"] = torch.randn(6).to(DEVICE) if sinks else None
    found = table_attention(query, table, 1, rows, splits=splits, **about)
    assert relative_error(found, table_attention_reference(query, buffers, 1, rows, **about)) < 1e-5


@pytest.mark.parametrize("rows", [[[7], [0], [30]], [[1, 2, 7], [0, 3, 5], [9, 30, 30]]], ids=["one row", "several"])
def test_rows_are_written_where_they_are_and_nowhere_else(rows: list[list[int]]) -> None:
    _, buffers, table, at = tabled(rows, 4, 2, 64, 48, torch.float16)
    before = [[held.clone() for held in (*buffer.keys, *buffer.values)] for buffer in buffers]
    key, value = (torch.randn(3, len(rows[0]), 2, dim).to(DEVICE, torch.float16).transpose(1, 2) for dim in (64, 48))
    if rows[2] == [9, 30, 30]:
        key[2, :, 2], value[2, :, 2] = key[2, :, 1], value[2, :, 1]
    append_rows(key, value, table, 1, at)
    for index, (own, buffer) in enumerate(zip(rows, buffers, strict=True)):
        assert torch.equal(buffer.keys[1][0, :, own], key[index])
        assert torch.equal(buffer.values[1][0, :, own], value[index])
        for held, old in zip((*buffer.keys, *buffer.values), before[index], strict=True):
            layer = 1 if held is buffer.keys[1] or held is buffer.values[1] else 0
            if layer == 1:
                held[:, :, own], old[:, :, own] = 0, 0
            assert torch.allclose(held, old, rtol=0, atol=0, equal_nan=True)


def test_rows_that_do_not_fit_are_refused() -> None:
    query, buffers, table, rows = tabled([[7], [0]], 4, 2, 64, 64, torch.float32)
    for call, message in (
        (lambda: table_attention(query[:1], table, 0, rows[:1], scaling=1.0), "a table of 1 requests"),
        (lambda: table_attention(query, table, 0, rows[:1], scaling=1.0), r"rows must be \[2, 1\] int64"),
        (lambda: table_attention(query, table, 0, rows[:, 0], scaling=1.0), r"rows must be \[2, 1\] int64"),
        (lambda: table_attention(query[..., :32], table, 0, rows, scaling=1.0), "64 channels side by side"),
        (lambda: table_attention(query[..., ::2], table, 0, rows, scaling=1.0), "64 channels side by side"),
        (lambda: table_attention(query[:, :3], table, 0, rows, scaling=1.0), "3 query heads over 2 key heads"),
        (lambda: append_rows(query[:, :2], query[:, :1], table, 0, rows), "do not go into buffers"),
        (lambda: append_rows(query, query, table, 0, rows), "do not go into buffers"),
        (lambda: append_rows(query[:, :2], query[:, :2].repeat_interleave(2, 3)[..., ::2], table, 0, rows), "side"),
        (lambda: table_attention(query.half(), table, 0, rows, scaling=1.0), "float16 over buffers of torch.float32"),
        (lambda: table_attention(query, table, 0, rows, scaling=1.0, window=0), "window must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    apart = KVBuffer(tuple(held.transpose(1, 2) for held in buffers[0].keys), buffers[0].values)
    with pytest.raises(ValueError, match="must be contiguous"):
        KVTable.of([apart], table.shapes, 8)


def test_what_the_benchmark_times_is_the_same_on_both_sides() -> None:
    timed = run_path(str(Path(__file__).parents[2] / "benchmarks" / "kernel_floors.py"))
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "num_hidden_layers": 2}
    found = list(timed["cases"](sizes, 1030, 40, torch.float32, torch.device(DEVICE)))
    assert len(found) == 7
    for case in found:
        taken = case.kernel().clone()  # what is placed is placed by both at the same place
        with timed["without_kernels"]():
            assert relative_error(taken, case.plain()) < 1e-5, case.name
        assert case.nbytes > 0
    for tile in (launch.TALL, launch.Tile(64, 64), launch.Tile(16, 64)):
        tried = timed["others"](tile)
        assert len({tile, *tried}) == 1 + len(tried) > 4, "each once"
    tiles = [{"tile": "A", "ms": 0.5, "refusal": None}, {"tile": "B", "ms": None, "refusal": "[/tmp/x] does not fit"}]
    row = {"case": "this", "kernel_ms": 2.0, "torch_ms": 4.0, "floor_ms": 0.25, "tiles": tiles}
    assert timed["said"](row).splitlines() == [
        "this: 2.000 ms, torch 4.000 ms, 2.0 times as fast; floor 0.250 ms",
        "  A: 0.500 ms, 0.50",
        "  B: [/tmp/x] does not fit",
    ]
    assert timed["said"]({"case": "this", "refusal": "no room"}) == "this: no room"


def test_keys_after_the_last_row_are_not_read() -> None:
    query, key, value, rows = operands(2, 1, [3, 9], 100, 64, 64, torch.float32)
    key[:, :, 10:], value[:, :, 10:] = float("nan"), float("nan")
    found = sparse_attention(query, key, value, rows, scaling=1.0)
    expected = sparse_attention_reference(query, key[:, :, :10], value[:, :, :10], rows, scaling=1.0)
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("splits", [None, 2, 5], ids="splits {}".format)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("reduce", "window", "softcap"), [("mean", None, None), ("max", None, None), ("mean", 50, 5.0), ("max", 50, None)]
)
def test_context_scores_are_those_of_the_reference(
    dtype: torch.dtype, reduce: str, window: int | None, softcap: float | None, splits: int | None
) -> None:
    """However many parts the keys are split into, some of which a row may see nothing of."""
    query, key, _, rows = operands(6, 2, [*range(150, 181), 190], 191, 64, 64, dtype)
    known = torch.rand(191, device=DEVICE) < 0.7
    known[rows] = True
    poisoned = key.masked_fill(~known[None, None, :, None], float("nan"))
    about = {"scaling": 0.2, "softcap": softcap, "window": window, "reduce": reduce}
    found = context_scores(query, poisoned, rows, known, splits=splits, **about)  # type: ignore[arg-type]
    clean = key.masked_fill(~known[None, None, :, None], 0.0)
    expected = attention_weights(query.float(), clean.float(), rows, known, **about)  # type: ignore[arg-type]
    assert relative_error(found, expected) < TOLERANCE[dtype]
    assert float(found[~known].abs().max()) == 0
    if reduce == "mean":
        assert float(found.sum()) == pytest.approx(1, abs=1e-3)


def test_context_scores_of_many_rows_and_a_few_channels() -> None:
    query, key, _, rows = operands(9, 3, list(range(100)), 100, 80, 80, torch.float32)
    known = torch.ones(100, dtype=torch.bool, device=DEVICE)
    expected = attention_weights(query, key, rows, known, scaling=0.1)
    for splits in (1, 3):  # the first rows see nothing of the last part
        found = context_scores(query, key, rows, known, scaling=0.1, splits=splits)
        assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize(
    ("programs", "keys", "splits"), [(16, 10_240, 16), (1, 100_000, 32), (1, 600, 2), (1, 100, 1), (300, 100_000, 1)]
)
def test_keys_are_split_as_far_as_programs_leave_a_device_empty(
    programs: int, keys: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "processors", lambda device: 264)
    assert parts.splits_of(programs, keys, torch.device(DEVICE)) == splits


@pytest.mark.parametrize(("programs", "splits"), [(24, 22), (120, 4), (256, 2), (320, 2), (384, 1), (512, 1)])
def test_programs_of_more_and_less_work_are_twice_as_many_as_run_at_once(
    programs: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "processors", lambda device: 264)
    assert parts.splits_of(programs, 10_240, torch.device(DEVICE), uneven=True) == splits
    assert parts.splits_of(programs, 512, torch.device(DEVICE), uneven=True) <= 2


def test_keys_are_split_no_further_than_parts_are_put_together() -> None:
    query, key, value, rows = operands(2, 1, [3, 9], 10, 64, 64, torch.float32)
    known = torch.ones(10, dtype=torch.bool, device=DEVICE)
    for splits in (0, parts.MOST_SPLITS + 1):
        for call in (
            lambda splits=splits: sparse_attention(query, key, value, rows, scaling=1.0, splits=splits),
            lambda splits=splits: context_scores(query, key, rows, known, scaling=1.0, splits=splits),
        ):
            with pytest.raises(ValueError, match="split into 1 to 32 parts"):
                call()


def test_buffers_of_different_lengths_are_placed_at_once() -> None:
    rope = LayerRope(1000.0 ** -(torch.arange(0, 64, 2, device=DEVICE) / 64))
    stored = torch.randn(10, 2, 64).to(DEVICE)
    found, expected = ([torch.zeros(1, 2, size, 64, device=DEVICE) for size in (12, 300)] for _ in range(2))
    for into, how in ((found, place_blocks), (expected, place_blocks_reference)):
        how([Block(stored, None, into[0], 1, rope), Block(stored, None, into[1], 280, rope)])
    for mine, yours in zip(found, expected, strict=True):
        assert relative_error(mine, yours) < 1e-5


def test_the_same_prompt_is_scored_alike() -> None:
    query, key, _, rows = operands(6, 2, list(range(60, 100)), 100, 64, 64, torch.float32)
    known = torch.ones(100, dtype=torch.bool, device=DEVICE)
    one, other = (context_scores(query, key, rows, known, scaling=0.1) for _ in range(2))
    assert torch.equal(one, other)


def test_operands_that_do_not_fit_are_refused() -> None:
    query, key, value, rows = operands(4, 2, [1, 5], 6, 64, 64, torch.float32)
    for bad, message in (
        ((query[0], key, value, rows), "query must be"),
        ((query, key.double(), value, rows), "key must be of one dtype"),
        ((query, key, value.transpose(2, 3), rows), "channels must lie side by side"),
        ((query[:, :3], key, value, rows), "does not fit key"),
        ((query, key, value[:, :, :5], rows), "value .* does not fit"),
        ((query, key, value, rows[:1]), "rows must be"),
        ((query, key, value, rows.int()), "rows must be"),
        ((query, key, value, rows, {"sinks": torch.zeros(3)}), "sinks must be"),
        ((query, key, value, rows, {"window": 0}), "window must be"),
        ((query, key, value, rows, {"scaling": 0.0}), "scaling must be"),
        ((torch.zeros(1, 4, 2, 300), torch.zeros(1, 2, 6, 300), value, rows), "at most 256"),
    ):
        with pytest.raises(ValueError, match=message):
            sparse_attention(*bad[:4], **({"scaling": 1.0} | (bad[4] if len(bad) > 4 else {})))  # type: ignore[misc]
    with pytest.raises(ValueError, match="known must be"):
        context_scores(query, key, rows, torch.ones(5, dtype=torch.bool), scaling=1.0)


def block(tokens: int, start: int, dtype: torch.dtype, numbers: str, rope: LayerRope | None, into: Tensor) -> Block:
    """A stored block of fresh random numbers; with a rotation they are keys, else values."""
    stored = torch.randn(tokens, into.shape[1], into.shape[3]).to(DEVICE, dtype)
    if numbers == "model":
        return Block(stored, None, into, start, rope)
    return Block(*narrow(stored, numbers, over=2 if rope is None else 0), into, start, rope)


@pytest.mark.parametrize(
    ("rope", "dtype", "numbers"),
    [
        *[("all channels", dtype, numbers) for dtype in TOLERANCE for numbers in ("model", "int8", "fp8")],
        *[(rope, torch.float16, "int8") for rope in ("interleaved", "some channels", "no position", "values")],
        ("values", torch.bfloat16, "fp8"),
        ("values", torch.float32, "model"),
    ],
    ids=str,
)
def test_blocks_are_placed_where_and_as_they_belong(rope: str, dtype: torch.dtype, numbers: str) -> None:
    """Several chunks in two layers, one beside another, and nothing else written."""
    frequencies = 10000.0 ** -(torch.arange(0, 24 if rope == "some channels" else 80, 2) / 80)
    ropes = {"no position": LayerRope(None), "values": None}
    own = ropes.get(rope, LayerRope(frequencies.to(DEVICE), interleaved=rope == "interleaved"))
    layers = [torch.full((1, 3, 200, 80), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2)]
    blocks = [
        block(tokens, start, dtype, numbers, own, into)
        for into in layers
        for tokens, start in ((37, 4), (1, 41), (60, 99))
    ]
    place_blocks(blocks)
    found = [layer.clone() for layer in layers]
    for layer in layers:
        layer.fill_(float("nan"))
    place_blocks_reference(blocks)
    for ours, theirs in zip(found, layers, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert relative_error(ours.nan_to_num(), theirs.nan_to_num()) < TOLERANCE[dtype]


def test_blocks_of_several_kinds_are_placed_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    rope = LayerRope(10000.0 ** -(torch.arange(0, 64, 2, device=DEVICE) / 64))
    keys, values = (torch.full((1, 2, 50, 64), float("nan"), device=DEVICE) for _ in range(2))
    blocks = [
        block(10, 0, torch.float32, "int8", rope, keys),
        block(10, 10, torch.float32, "model", rope, keys),
        block(20, 5, torch.float32, "fp8", None, values),
        block(10, 30, torch.float32, "model", None, values),
        block(9, 20, torch.float32, "model", LayerRope(None), keys),
    ]
    launched: list[dict[str, Any]] = []
    monkeypatch.setattr(place, "place", watched(place.place, launched))
    place_blocks(blocks)
    assert len(launched) == 3, "by format of numbers, whether they rotate or not"
    found = keys.clone(), values.clone()
    place_blocks_reference(blocks)
    assert all(torch.allclose(a, b, atol=1e-6, equal_nan=True) for a, b in zip(found, (keys, values), strict=True))


def test_blocks_that_do_not_fit_are_refused() -> None:
    into = torch.zeros(1, 2, 50, 64)
    stored, scale = torch.zeros(10, 2, 64), torch.zeros(1, 2, 64)
    rope = LayerRope(torch.ones(32))
    for bad, message in (
        (lambda: Block(stored, None, into, 41), "exceed a buffer of 50"),
        (lambda: Block(stored, None, into, -1), "exceed a buffer of 50"),
        (lambda: Block(torch.zeros(10, 3, 64), None, into, 0), "does not go into"),
        (lambda: Block(stored, scale[:, :1], into, 0), "scales .* do not fit"),
        (lambda: Block(stored.transpose(0, 1).contiguous().transpose(0, 1), None, into, 0), "must be contiguous"),
        (lambda: Block(stored, torch.zeros(10, 2, 1), into, 0, rope), "scaled by channel"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()


class Nearby:
    """Stands for a transfer where host and device are one; what is sent is there `at_once`, or not until received."""

    device = torch.device(DEVICE)

    def __init__(self, *, at_once: bool = True) -> None:
        self.at_once = at_once

    def send(self, tensors: list[Tensor]) -> Sent:
        class There(Sent):
            here = self.at_once

            def receive(self) -> None:
                pass

        return There(self.device, tensors, 0, None, None)  # type: ignore[arg-type]


@pytest.fixture
def warmed(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> FusionEngine:
    """An engine of a family of models and a format of numbers, its passages warmed without kernels.

    Ask for it before `with_kernels`.
    """
    family, numbers = getattr(request, "param", ("llama", "model"))
    store = MemoryStore()
    store.numbers = numbers
    engine = FusionEngine(LanguageModel.wrap(build_model(family).to(DEVICE), tokenizer), store)
    engine.warm(PASSAGES, bases=(FRAMED,))
    return engine


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have the engine use kernels on this device, if need be under the interpreter; returns what was called."""
    called: list[str] = []

    def counted(name: str, kernel: Any) -> Any:
        def call(*operands: Any, **rest: Any) -> Any:
            called.append(name)
            return kernel(*operands, **rest)

        return call

    monkeypatch.setattr("qcfuse_rag.fuse.kernels.support.kernels_run_on", lambda *given: True)
    monkeypatch.setattr("qcfuse_rag.fuse.assembly.kernels_run_on", lambda *given: True)
    monkeypatch.setattr("qcfuse_rag.fuse.assembly.kernels_place", lambda *given: True)
    monkeypatch.setattr("qcfuse_rag.fuse.arrival.kernels_place", lambda *given: True)
    if DEVICE == "cpu":
        monkeypatch.setattr("qcfuse_rag.fuse.loading.Loading.transfer", lambda loading: Nearby())
    monkeypatch.setattr("qcfuse_rag.fuse.step.kernels_run_on", lambda *given: True)
    monkeypatch.setattr(attention, "sparse_attention", counted("attention", sparse_attention))
    monkeypatch.setattr(table, "table_attention", counted("by table", table_attention))
    monkeypatch.setattr(table, "append_rows", counted("append", append_rows))
    monkeypatch.setattr(context_score, "context_scores", counted("score", context_scores))
    monkeypatch.setattr(place, "place_blocks", counted("place", place_blocks))
    return called


@pytest.mark.parametrize(
    "warmed",
    [("llama", "int8"), ("gemma2-softcap", "model"), ("gpt-oss-sinks", "model"), ("cohere2-interleaved", "fp8")],
    indirect=True,
    ids=lambda about: "-".join(about),
)
def test_the_engine_answers_alike_with_and_without_kernels(
    warmed: FusionEngine, with_kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, lm = warmed, warmed.lm
    prompt, method = engine.prompt(QUESTION, PASSAGES), make_method("prophetkv", ratio=0.3, base=FRAMED)
    ours = engine.prefill(prompt, method=method, room=4)
    assert set(with_kernels) == {"attention", "score", "place"}
    with_kernels.clear()
    followed = forward_step(lm, [7], [len(prompt)], [ours.buffer])
    assert set(with_kernels) == {"by table", "append"}
    monkeypatch.setattr("qcfuse_rag.fuse.loading.Loading.transfer", lambda loading: None)
    for module in ("kernels.support", "assembly", "step"):
        monkeypatch.setattr(f"qcfuse_rag.fuse.{module}.kernels_run_on", lambda *given: False)
    with_kernels.clear()
    theirs = engine.prefill(prompt, method=method, room=4)
    assert not with_kernels
    assert ours.report.selected == theirs.report.selected
    assert ours.report.bytes_loaded == theirs.report.bytes_loaded or engine.store.stats()[0].numbers != "model"
    assert relative_error(ours.logits, theirs.logits) < 1e-4
    assert relative_error(followed, forward_step(lm, [7], [len(prompt)], [theirs.buffer])) < 1e-4


@pytest.mark.parametrize("at_once", [True, False])
def test_layers_are_placed_by_one_launch_if_they_are_there(
    at_once: bool, warmed: FusionEngine, with_kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None before it is, which would have the first layer wait for the last, and at first a few."""
    launched: list[dict[str, Any]] = []
    monkeypatch.setattr(place, "place", watched(place.place, launched))
    monkeypatch.setattr("qcfuse_rag.fuse.loading.Loading.transfer", lambda loading: Nearby(at_once=at_once))
    lm, prompt = warmed.lm, warmed.prompt(QUESTION, PASSAGES)
    assembly = Assembly.empty(lm, prompt, len(prompt))
    assembly.load(warmed.store, FRAMED, loading=Loading(lm))
    for thread in threading.enumerate():
        if thread.name == "qcfuse-loading":
            thread.join(60)
    assert assembly.arriving.arrive is not None
    assembly.arriving.arrive(0)
    assert len(launched) == 1, "keys and values together"
    assembly.arriving.arrive(lm.n_layers - 1)
    assert lm.n_layers == 4
    assert len(launched) == (3 if at_once else 4), "one layer, one more, then two"


def test_passages_are_warmed_alike_with_and_without_kernels(warmed: FusionEngine, with_kernels: list[str]) -> None:
    other = FusionEngine(warmed.lm, MemoryStore())
    other.warm(PASSAGES[:1], bases=(FRAMED,))
    assert set(with_kernels) == {"attention", "score"}
    [key] = other.keys(other.prompts.chunk_ids(PASSAGES[0]), (FRAMED,))
    ours, theirs = other.store.get(key), warmed.store.get(key)
    assert isinstance(ours, ChunkKV)
    assert isinstance(theirs, ChunkKV)
    for name in theirs.names():
        assert torch.allclose(ours.blocks[name].float(), theirs.blocks[name].float(), rtol=1e-4, atol=1e-4)


def test_a_damaged_block_is_a_miss_with_kernels_too(warmed: FusionEngine, with_kernels: list[str]) -> None:
    """Nothing of the chunk is placed; what the store lacks is computed."""
    engine = warmed
    [key] = engine.keys(engine.prompts.chunk_ids(PASSAGES[1]), (FRAMED,))
    chunk = engine.store.get(key)
    assert isinstance(chunk, ChunkKV)

    broken, get = damaged(chunk, "value.1"), engine.store.get
    engine.store.discard(key)
    engine.store.get = lambda one: broken if one == key else get(one)  # type: ignore[method-assign]
    prompt = engine.prompt(QUESTION, PASSAGES)
    done = engine.prefill(prompt, method=make_method("reuse", base=FRAMED))
    assert [lookup.hit for lookup in done.report.lookups] == [True, True, False, True]
    assert done.logits.isfinite().all()


def test_kernels_are_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    half = (torch.float16, 64)
    assert kernel_refusal(torch.device("cpu"), *half) == "there are none for cpu"
    device = torch.device("cuda", 7)  # none the cache has seen
    monkeypatch.setenv("QCFUSE_KERNELS", "0")
    assert kernel_refusal(device, *half) == "switched off by QCFUSE_KERNELS=0"
    kernel_refusal.cache_clear()
    monkeypatch.setenv("QCFUSE_KERNELS", "1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert kernel_refusal(device, torch.float64, 64) == "there are none for torch.float64 and 64 channels a head"
    assert kernel_refusal(device, torch.float16, 576) == "there are none for torch.float16 and 576 channels a head"
    monkeypatch.setattr(support, "kernel_errors", lambda *given: {"attention": 1e-3, "place": float("nan")})
    assert kernel_refusal(device, *half) == "place is off by nan"
    kernel_refusal.cache_clear()

    def broken(*given: Any) -> dict[str, float]:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(support, "kernel_errors", broken)
    assert kernel_refusal(device, *half) == "they do not run here (RuntimeError: no such instruction)"
    kernel_refusal.cache_clear()

    def full(*given: Any) -> dict[str, float]:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(support, "kernel_errors", full)
    assert not support.kernels_run_on(device, *half)
    monkeypatch.setattr(support, "kernel_errors", lambda *given: {"attention": 1e-3})
    assert support.kernels_run_on(device, *half), "to find no room once is not remembered"
    kernel_refusal.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=DTYPES[2].marks)], ids=str)
def test_kernels_are_within_their_tolerance_here(dtype: torch.dtype) -> None:
    errors = support.kernel_errors(torch.device(DEVICE), dtype, 64)
    assert len(errors) == 3 + 3 + 5 + 4
    assert max(errors.values()) < support.TOLERANCE


def test_a_chunk_that_does_not_fit_is_a_miss(warmed: FusionEngine, with_kernels: list[str]) -> None:
    engine = warmed
    [key] = engine.keys(engine.prompts.chunk_ids(PASSAGES[1]), (FRAMED,))
    chunk = engine.store.get(key)
    assert isinstance(chunk, ChunkKV)
    tensors = {name: chunk.blocks[name] for name in chunk.names()}
    tensors["key.0"] = tensors["key.0"][:, :1].contiguous()
    engine.store.discard(key)
    engine.store.put(key, replace(chunk, blocks=HeldBlocks(tensors)))
    done = engine.prefill(engine.prompt(QUESTION, PASSAGES), method=make_method("reuse", base=FRAMED))
    assert "not go into" in str([lookup.reason for lookup in done.report.lookups])
    assert done.logits.isfinite().all()


def watched(kernel: Any, launched: list[dict[str, Any]]) -> Any:
    """A kernel that notes by what constants it is launched."""

    class Watched:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*operands: Any, **constants: Any) -> None:
                launched.append(constants)
                kernel[grid](*operands, **constants)

            return launch

    return Watched()


def test_warming_up_compiles_all_that_other_lengths_take(
    with_kernels: list[str], tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short and long questions over few keys and many, very many rows: a request waits for no compiler."""
    assert warming.MANY * warming.TOKENS > 2 * parts.KEYS_PER_SPLIT > 2 * warming.FEW * warming.TOKENS
    monkeypatch.setattr(warming, "TOKENS", 16)  # the interpreter is slow
    monkeypatch.setattr(parts, "KEYS_PER_SPLIT", 100)
    for module in (parts, launch):
        monkeypatch.setattr(module, "processors", lambda device: 8)
    monkeypatch.setattr(attention, "takes_tall", lambda *given: True)
    monkeypatch.setattr(warming, "kernels_run_on", lambda *given: True)
    attended: list[dict[str, Any]] = []
    scored: list[dict[str, Any]] = []
    monkeypatch.setattr(attention, "attend", watched(attention.attend, attended))
    monkeypatch.setattr(context_score, "weights_of_keys", watched(context_score.weights_of_keys, scored))
    model = build_model("llama", num_hidden_layers=2, max_position_embeddings=2048)
    lm = LanguageModel.wrap(model.to(DEVICE, torch.float16), tokenizer)
    warming.warm_up(lm, FusionEngine(lm, MemoryStore()).prompts)
    all_ways = {(rows, split) for rows in (16, 64) for split in (False, True)}
    launched = {(one["BLOCK_ROWS"], one["SPLIT"]) for one in attended if not one["TABLED"]}
    assert launched == {*all_ways, (launch.TALL.rows, False)}
    assert {(one["BLOCK_ROWS"], one["BLOCK_SPLITS"] > 1) for one in scored} == all_ways
    assert {one["BLOCK_SPLITS"] for one in scored} == {1, parts.MOST_SPLITS}
