"""Dense causal attention of full prefill, by the flash-attn for the GPU if it is installed, else by torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_MAX_DIM = 256
FLASH_DIM_STEP = 8
"""Head dimensions that flash-attn computes without padding are multiples of it."""
FLASH_NAMES = {"flash_attn": "flash-attn", "flash_attn_interface": "flash-attn 3"}
"""Modules with a `flash_attn_func`."""
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Torch's attention backends on a GPU, without cuDNN.

Since 2.11, torch prefers cuDNN on Hopper and Blackwell. It builds a plan for each new number of rows and keys, in 23 to
440 ms (modelscope/FunASR#3704). Passages and prompts differ in length, and each step of decoding has one more key. On a
B200 cuDNN also gave wrong results (pytorch#193893).
"""


def flash_module(capability: tuple[int, int]) -> str | None:
    """Return the module of the flash-attn that is faster than torch, or as fast, on GPUs of a compute capability.

    Version 2 reaches 329 TFLOP/s on Hopper and version 3 631 (pytorch#142132). Version 3 exists for Hopper alone. Torch
    has the kernels of version 2, so that package is no gain on Hopper; its builds for newer GPUs are not known here.
    """
    if capability == (9, 0):
        return "flash_attn_interface"
    return "flash_attn" if (8, 0) <= capability < (9, 0) else None


def dense_attention_name(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the attention that full prefill uses on a device: a flash-attn, or torch's own."""
    module = _installed_flash(device, dtype)
    return "torch's fused attention" if module is None else FLASH_NAMES[module]


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
    dim, module = query.shape[-1], _installed_flash(query.device, query.dtype)
    if module is not None and value.shape[-1] == dim <= FLASH_MAX_DIM and dim % FLASH_DIM_STEP == 0:
        by_token = (tensor.transpose(1, 2) for tensor in (query, key, value))
        found = import_module(module).flash_attn_func(*by_token, softmax_scale=scaling, causal=True)
        out: Tensor = found[0] if isinstance(found, tuple) else found  # older builds of version 3 add the log sums
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


def _installed_flash(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the module of the flash-attn to use on a device, if it is installed."""
    if device.type != "cuda" or dtype not in FLASH_DTYPES:
        return None
    module = flash_module(torch.cuda.get_device_capability(device))
    return module if module is not None and _is_installed(module) else None


@cache
def _is_installed(module: str) -> bool:
    """Return whether a flash-attn can be imported; a build for another torch or CUDA cannot."""
    if find_spec(module) is None:
        return False
    try:
        import_module(module)
    except Exception:  # a build for another torch or CUDA can raise any error
        return False
    return True
