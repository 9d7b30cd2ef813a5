"""Dense causal attention of full prefill, by flash-attn if it is installed, else by torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_MAX_DIM = 256
FLASH_MIN_CAPABILITY = (8, 0)
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Torch's attention backends on a GPU, without cuDNN.

Since 2.11, torch prefers cuDNN on Hopper and Blackwell. It builds a plan for each new number of rows and keys, in 23 to
440 ms (modelscope/FunASR#3704). Passages and prompts differ in length, and each step of decoding has one more key. On a
B200 cuDNN also gave wrong results (pytorch#193893).
"""


def dense_attention_name(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the attention that full prefill uses on a device: flash-attn, or torch's own."""
    if _flash_supports(device, dtype):
        return "flash-attn"
    return "torch's fused attention"


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attend with R rows to R keys; each row sees the keys up to its own position.

    Args:
        query: `[B, Hq, R, D]`.
        key: `[B, Hkv, R, D]`.
        value: `[B, Hkv, R, Dv]`.
        scaling: factor on scores.

    Returns:
        `[B, Hq, R, Dv]`.
    """
    dims = (query.shape[-1], value.shape[-1])
    if _flash_supports(query.device, query.dtype) and dims[0] == dims[1] <= FLASH_MAX_DIM:
        from flash_attn import flash_attn_func

        by_token = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out: Tensor = flash_attn_func(*by_token, softmax_scale=scaling, causal=True)
        return out.transpose(1, 2)
    grouped = query.shape[1] != key.shape[1]
    return torch_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)


def torch_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Attend by `torch.nn.functional.scaled_dot_product_attention`, by one of `BACKENDS` on a GPU."""
    with chosen_backends(query.device):
        return functional.scaled_dot_product_attention(query, key, value, **options)


def chosen_backends(device: torch.device) -> AbstractContextManager[object]:
    """Let torch attend by one of `BACKENDS` inside the context if the device is a GPU."""
    return sdpa_kernel(BACKENDS) if device.type == "cuda" else nullcontext()


def _flash_supports(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or dtype not in FLASH_DTYPES or not _is_installed():
        return False
    return torch.cuda.get_device_capability(device) >= FLASH_MIN_CAPABILITY


@cache
def _is_installed() -> bool:
    """Return whether flash-attn can be imported; a build for another torch or CUDA cannot."""
    if find_spec("flash_attn") is None:
        return False
    try:
        import flash_attn  # noqa: F401
    except Exception:  # a build for another torch or CUDA can raise any error
        return False
    return True
