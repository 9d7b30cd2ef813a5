"""Dense attention by each library: the same results, in the layout that the library expects."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qcfuse_rag.runtime.attention import dispatch
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.reference_attention import explicit_attention
from qcfuse_rag.runtime.rows import AttentionParams, RowsPlan, StepPlan


def operands() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 6, 9, 16), torch.randn(2, 3, 9, 16), torch.randn(2, 3, 9, 16)


def expected(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return explicit_attention(query, key, value, torch.ones(9, 9, dtype=torch.bool).tril(), AttentionParams(0.3))


def test_torch_equals_explicit_attention() -> None:
    query, key, value = operands()
    out = dispatch.causal_attention(query, key, value, 0.3)
    assert torch.allclose(out, expected(query, key, value), atol=1e-5)


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attend as flash-attn's documentation says: tokens before heads, key heads shared in turn, no later token seen."""
    per_key = query.shape[2] // key.shape[2]
    heads = []
    for head in range(query.shape[2]):
        scores = scaling * torch.einsum("brd,bkd->brk", query[:, :, head], key[:, :, head // per_key])
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        heads.append(torch.einsum("brk,bkd->brd", weights, value[:, :, head // per_key]))
    return torch.stack(heads, dim=2)


@pytest.mark.parametrize("with_sums", [False, True])
def test_flash_attn_gets_tokens_before_heads(monkeypatch: pytest.MonkeyPatch, with_sums: bool) -> None:
    calls = []

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool) -> object:
        assert causal
        assert (q.shape, k.shape) == ((2, 9, 6, 16), (2, 9, 3, 16))
        calls.append(causal)
        out = grouped_attention(q, k, v, softmax_scale)
        return (out, torch.zeros(2, 6, 9)) if with_sums else out

    package = ModuleType(dispatch.FLASH)
    package.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, dispatch.FLASH, package)
    monkeypatch.setattr(dispatch, "_has_flash", lambda *_: True)
    query, key, value = operands()
    torchs = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)
    assert torch.allclose(dispatch.causal_attention(query, key, value, 0.3), torchs, atol=1e-5)
    assert len(calls) == 1


def test_flash_attn_is_not_asked_for_head_dimensions_that_it_would_have_to_pad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, dispatch.FLASH, None)  # importing it would raise
    monkeypatch.setattr(dispatch, "_has_flash", lambda *_: True)
    query, key, value = torch.randn(1, 2, 9, 12), torch.randn(1, 2, 9, 12), torch.randn(1, 2, 9, 12)
    out = dispatch.causal_attention(query, key, value, 0.3)
    assert torch.allclose(out, expected(query, key, value), atol=1e-5)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_the_library_in_use_follows_from_the_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    own, gpu = "torch's fused attention", torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(dispatch, "_is_installed", lambda: True)
    assert dispatch.dense_attention_name(gpu, torch.bfloat16) == ("flash-attn 3" if capability == (9, 0) else own)
    assert dispatch.dense_attention_name(gpu, torch.float32) == own
    assert dispatch.dense_attention_name(torch.device("cpu"), torch.bfloat16) == own
    monkeypatch.setattr(dispatch, "_is_installed", lambda: False)
    assert dispatch.dense_attention_name(gpu, torch.bfloat16) == own


def test_a_build_that_cannot_be_imported_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, dispatch.FLASH, None)
    dispatch._is_installed.cache_clear()
    assert not dispatch._is_installed()
    dispatch._is_installed.cache_clear()


def test_torch_never_attends_by_cudnn_on_a_gpu() -> None:
    """It builds a plan for every new length."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with dispatch.chosen_backends(torch.device("cuda", 0)):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.parametrize("kind", ["full", "rows", "steps", "without a plan"])
def test_every_attention_of_torch_is_by_the_chosen_backends(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend, chosen, calls = functional.scaled_dot_product_attention, [0], list[int]()

    @contextmanager
    def choosing(device: torch.device) -> Iterator[None]:
        chosen[0] += 1
        yield
        chosen[0] -= 1

    def attending(*operands: Any, **options: Any) -> Tensor:
        calls.append(chosen[0])
        return attend(*operands, **options)

    monkeypatch.setattr(dispatch, "chosen_backends", choosing)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", attending)
    query, key, value = (torch.randn(1, heads, 9, 16) for heads in (6, 3, 3))
    rows = {"full": torch.arange(9), "rows": torch.tensor([2, 8])}.get(kind)
    plan: object = None if rows is None else RowsPlan.of(rows)
    if kind == "steps":
        plan, query = StepPlan([KVBuffer((key,), (value,))], torch.tensor([[8]]), (8,), [None]), query[:, :, -1:]
    if kind == "rows":
        query = query[:, :, rows]
    layer = nn.Module()
    layer.layer_idx, layer.num_key_value_groups, layer.is_causal = 0, 2, True
    dispatch.rows_attention(layer, query, key, value, None, 0.3, fusion=plan)  # type: ignore[arg-type]
    assert calls == [1]
