"""Dense attention by each library: the same results, in the layout that the library expects."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qcfuse_rag.runtime.attention import dispatch
from qcfuse_rag.runtime.reference_attention import explicit_attention
from qcfuse_rag.runtime.rows import AttentionParams


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


@pytest.mark.parametrize(
    ("module", "capability", "with_sums"),
    [("flash_attn", (8, 9), False), ("flash_attn_interface", (9, 0), False), ("flash_attn_interface", (9, 0), True)],
)
def test_flash_attn_gets_tokens_before_heads(
    monkeypatch: pytest.MonkeyPatch, module: str, capability: tuple[int, int], with_sums: bool
) -> None:
    calls = []

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool) -> object:
        assert causal
        assert (q.shape, k.shape) == ((2, 9, 6, 16), (2, 9, 3, 16))
        calls.append(module)
        out = grouped_attention(q, k, v, softmax_scale)
        return (out, torch.zeros(2, 6, 9)) if with_sums else out

    package = ModuleType(module)
    package.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, package)
    found = dispatch.flash_module(capability)
    monkeypatch.setattr(dispatch, "_installed_flash", lambda device, dtype: found)
    query, key, value = operands()
    torchs = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)
    assert torch.allclose(dispatch.causal_attention(query, key, value, 0.3), torchs, atol=1e-5)
    assert calls == [module]


def test_flash_attn_is_not_asked_for_head_dimensions_that_it_would_have_to_pad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # importing it would raise
    monkeypatch.setattr(dispatch, "_installed_flash", lambda device, dtype: "flash_attn_interface")
    query, key, value = torch.randn(1, 2, 9, 12), torch.randn(1, 2, 9, 12), torch.randn(1, 2, 9, 12)
    out = dispatch.causal_attention(query, key, value, 0.3)
    assert torch.allclose(out, expected(query, key, value), atol=1e-5)


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((7, 5), "torch's fused attention"),
        ((8, 0), "flash-attn"),
        ((8, 9), "flash-attn"),
        ((9, 0), "flash-attn 3"),
        ((10, 0), "torch's fused attention"),
        ((12, 0), "torch's fused attention"),
    ],
)
def test_the_library_in_use_follows_from_the_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str
) -> None:
    installed = {"flash_attn", "flash_attn_interface"}
    monkeypatch.setattr(dispatch, "_is_installed", lambda module: module in installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert dispatch.dense_attention_name(gpu, torch.bfloat16) == name
    assert dispatch.dense_attention_name(gpu, torch.float32) == "torch's fused attention"
    assert dispatch.dense_attention_name(cpu, torch.bfloat16) == "torch's fused attention"
    installed.clear()
    assert dispatch.dense_attention_name(gpu, torch.bfloat16) == "torch's fused attention"


def test_version_2_is_not_used_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_is_installed", lambda module: module == "flash_attn")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert dispatch.dense_attention_name(torch.device("cuda", 0), torch.float16) == "torch's fused attention"


@pytest.mark.parametrize("module", list(dispatch.FLASH_NAMES))
def test_a_build_that_cannot_be_imported_counts_as_missing(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, module, None)
    dispatch._is_installed.cache_clear()
    assert not dispatch._is_installed(module)
    dispatch._is_installed.cache_clear()
