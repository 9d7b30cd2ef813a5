"""Reuse of buffer memory: never while a tensor uses it, and never more spare memory than the limit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qcfuse_rag import FusionEngine, make_method
from qcfuse_rag.fusion.pipeline import fuse_prompt
from qcfuse_rag.models.rope import KVShape
from qcfuse_rag.runtime.buffer import POOL_ALIGNMENT, BufferPool, KVBuffer
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.key import FRAMED
from tests.support.engines import loading_first
from tests.support.passages import PASSAGES, QUESTION

SHAPES = (KVShape(2, 8, 8), KVShape(1, 4, 6))
MIB = 1 << 20


def test_unused_memory_is_reused() -> None:
    pool = BufferPool()
    first = pool.allocate(MIB)
    address = first.data_ptr()
    assert address % POOL_ALIGNMENT == 0
    assert len(first) == MIB
    del first
    assert pool.allocate(MIB - 1000).data_ptr() == address


def test_a_view_of_a_view_keeps_its_memory() -> None:
    pool = BufferPool()
    view = pool.allocate(MIB).view(torch.float32).view(512, -1)[3]
    view.fill_(7)
    for _ in range(3):
        pool.allocate(MIB).fill_(0)
    assert bool((view == 7).all())


def test_spare_memory_is_bounded_and_the_oldest_block_is_freed() -> None:
    pool = BufferPool(max_spare_bytes=4 * MIB)
    tensors = [pool.allocate(MIB) for _ in range(8)]
    last = tensors[-1].data_ptr()
    while tensors:
        tensors.pop(0)
    assert 3 * MIB < pool.spare_bytes <= 4 * MIB
    again = [pool.allocate(MIB).fill_(0) for _ in range(3)]
    assert last in [tensor.data_ptr() for tensor in again]
    assert pool.spare_bytes == 0
    huge = pool.allocate(16 * MIB)
    del huge
    assert pool.spare_bytes == 0


def test_of_equal_blocks_the_one_returned_last_is_next() -> None:
    pool = BufferPool()
    first, second = pool.allocate(MIB), pool.allocate(MIB)
    address = first.data_ptr()
    del second, first
    assert pool.allocate(MIB).data_ptr() == address


def test_a_short_request_does_not_occupy_a_long_ones_memory() -> None:
    pool = BufferPool()
    long = pool.allocate(16 * MIB)
    address = long.data_ptr()
    del long
    assert pool.allocate(MIB).data_ptr() != address
    assert pool.allocate(9 * MIB).data_ptr() == address


@given(st.lists(st.tuples(st.integers(1, 300_000), st.integers(0, 5)), max_size=40))
@settings(max_examples=50)
def test_no_two_tensors_share_memory(orders: list[tuple[int, int]]) -> None:
    pool, tensors = BufferPool(MIB), []
    for number, (nbytes, released) in enumerate(orders):
        tensors.append((number % 251, pool.allocate(nbytes).fill_(number % 251)))
        if released < len(tensors):
            tensors.pop(released)
        assert all(bool((tensor == mark).all()) for mark, tensor in tensors)


def test_threads_never_share_memory() -> None:
    pool, wrong = BufferPool(), []

    def work(mark: int) -> None:
        for _ in range(200):
            tensor = pool.allocate(20_000 + mark).fill_(mark)
            if not bool((tensor == mark).all()):
                wrong.append(mark)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pooled_buffer_has_the_usual_layout(dtype: torch.dtype) -> None:
    device = torch.device("cpu")
    plain, pooled = (
        KVBuffer.allocate(SHAPES, 10, dtype=dtype, device=device, batch=3, pool=pool) for pool in (None, BufferPool())
    )
    for side in ("keys", "values"):
        for expected, tensor in zip(getattr(plain, side), getattr(pooled, side), strict=True):
            assert tensor.shape == expected.shape
            assert tensor.stride() == expected.stride()
            assert tensor.dtype == expected.dtype
    for number, tensor in enumerate((*pooled.keys, *pooled.values)):
        tensor.fill_(number)
    assert [float(tensor.float().mean()) for tensor in (*pooled.keys, *pooled.values)] == [0, 1, 2, 3]


def test_a_longer_request_takes_the_blocks_of_a_shorter_one_on_a_gpu() -> None:
    """In the sizes of Qwen3-8B; torch's allocator gives a freed block to the next tensor of its size."""
    shapes, device = (KVShape(8, 128, 128),) * 36, torch.device("meta")

    def tensors(tokens: int) -> list[torch.Tensor]:
        buffer = KVBuffer.allocate(shapes, tokens, dtype=torch.bfloat16, device=device, pool=BufferPool())
        assert buffer.capacity == tokens
        return [*buffer.keys, *buffer.values]

    def blocks(tokens: int) -> list[int]:
        return [tensor.untyped_storage().nbytes() for tensor in tensors(tokens)]

    assert blocks(10_804) == blocks(10_304)
    assert len({tuple(blocks(tokens)) for tokens in range(8_192, 16_384, 64)}) <= 9
    for tokens in (1, 17, 500, 10_304, 32_769):
        assert all(tensor.is_contiguous() and tensor.shape == (1, 8, tokens, 128) for tensor in tensors(tokens))
        assert all(size <= 1.125 * 8 * tokens * 128 * 2 + POOL_ALIGNMENT for size in blocks(tokens))


@pytest.mark.parametrize("name", ["full", "qcfuse", "prophetkv", "cacheblend"])
def test_answers_in_reused_memory_are_identical(name: str, engine: FusionEngine) -> None:
    engine.warm(PASSAGES, bases=(FRAMED,))
    prompt, runner = engine.prompt(QUESTION, PASSAGES), ModelRunner(engine.lm, engine.store)
    method = make_method(name) if name == "full" else make_method(name, ratio=0.3, base=FRAMED)
    expected = fuse_prompt(loading_first(engine.lm, engine.store), prompt, method).logits
    before = fuse_prompt(runner, prompt, method)
    address = before.buffer.keys[0].data_ptr()
    with torch.inference_mode():
        for tensor in (*before.buffer.keys, *before.buffer.values):
            tensor.fill_(torch.nan)
    del before, tensor
    after = fuse_prompt(runner, prompt, method)
    assert after.buffer.keys[0].data_ptr() == address
    assert torch.equal(after.logits, expected)
