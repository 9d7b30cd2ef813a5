"""Kernels between matrix products against torch: under the interpreter, compiled where there is a CUDA device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

pytest.importorskip("triton")

from qcfuse_rag.runtime.fused_layers.pointwise import gated, normalized, rotated
from tests.support.recorders import DEVICE

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    off = (found.double() - expected.double()).norm() / expected.double().norm()
    assert float(off) < TOLERANCE[expected.dtype]


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@torch.inference_mode()
@every_dtype
@pytest.mark.parametrize(("shape", "offset"), [((1, 300, 72), 0.0), ((2, 3, 9, 16), 1.0), ((1, 3, 4200), 0.0)], ids=str)
def test_rows_are_normalised(shape: tuple[int, ...], offset: float, dtype: torch.dtype) -> None:
    own = LlamaRMSNorm(shape[-1], eps=1e-3).to(DEVICE, dtype)
    weight, given = random(shape[-1], dtype=dtype), random(*shape, dtype=dtype)
    own.weight.data = weight + offset
    assert_close(normalized(given, weight, 1e-3, offset), own(given))


@every_dtype
@pytest.mark.parametrize("angles_of", [1, 2], ids=["the same for all requests", "each request's own"])
def test_queries_and_keys_are_rotated(angles_of: int, dtype: torch.dtype) -> None:
    query, key = (random(2, 5, heads, 24, dtype=dtype).transpose(1, 2) for heads in (9, 3))
    angles = torch.randn(angles_of, 5, 24, device=DEVICE)  # both halves of their own
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    for found, expected in zip(rotated(query, key, cos, sin), apply_rotary_pos_emb(query, key, cos, sin), strict=True):
        assert_close(found, expected)
        assert found.stride() == expected.stride()


@every_dtype
def test_gates_are_opened(dtype: torch.dtype) -> None:
    gates, values = 8 * random(3, 7, 333, dtype=dtype), random(3, 7, 333, dtype=dtype)
    gates[0, 0, :2] = torch.tensor([-300.0, 300.0])
    assert_close(gated(gates, values, "silu"), functional.silu(gates) * values)
    assert_close(gated(gates, values, "gelu_tanh"), functional.gelu(gates, approximate="tanh") * values)
