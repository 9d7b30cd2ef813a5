"""The attention function that transformers models call: sparse rows attend to the request's keys and values.

It is registered with transformers under the name `qcfuse`. A pass hands its plan to the model as a keyword argument, so
nothing is kept between calls and requests cannot mix. A block of neighbouring rows is one masked call. Full prefill is
dense: it goes to flash-attn 3 on a Hopper GPU if that is installed, else to torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qcfuse_rag.errors import UnsupportedModel
from qcfuse_rag.models.compatibility import shared_layer
from qcfuse_rag.models.cpu_weights import WORTH, takes_at_most
from qcfuse_rag.runtime.kernels.support import supports_kernels
from qcfuse_rag.runtime.reference_attention import explicit_attention, seen_keys
from qcfuse_rag.runtime.rows import AttentionParams, RowBlock, RowsPlan, StepPlan
from qcfuse_rag.runtime.table_plan import TablePlan

ROWS_PER_BLOCK = 128
LONG_KEYS, SAMPLED_KEYS = 1024, 16
"""Bfloat16 keys from which on products may attend to them faster on a CPU; of so many keys one is scored before."""


def row_blocks_of(plan: RowsPlan, layer: int, window: int | None) -> list[RowBlock]:
    """Split the rows of a plan, once for each set of visible keys and window; layers share the blocks.

    No block reads keys after the position of its last row. Key ranges index into the positions that are visible in the
    layer, if the plan has such. The host waits for the device unless it knows the rows and these positions.
    """
    key = (plan.visible_key(layer), window)
    if key not in plan.row_blocks:
        plan.row_blocks[key] = list(_split_rows(plan, layer, window))
    return plan.row_blocks[key]


def _split_rows(plan: RowsPlan, layer: int, window: int | None) -> Iterator[RowBlock]:
    length, visible = plan.length, plan.visible_at(layer)
    if window is not None and window >= length:
        window = None
    if visible is None and window is None and len(plan.rows) == length:
        yield RowBlock(0, length, 0, length, mask=None, causal=True)
        return
    rows = (plan.rows if plan.on_host is None else plan.on_host).tolist()
    on_host = None if plan.visible is None else plan.visible[layer]
    keys = range(length) if on_host is None else on_host.tolist()
    positions = torch.arange(length, device=plan.rows.device) if visible is None else visible
    for start in range(0, len(rows), ROWS_PER_BLOCK):
        stop = min(start + ROWS_PER_BLOCK, len(rows))
        first_row, last_row = rows[start], rows[stop - 1]
        stop_key = bisect_right(keys, last_row)
        start_key = 0 if window is None else bisect_right(keys, first_row - window)
        all_seen = keys[stop_key - 1] <= first_row
        all_in_window = window is None or last_row - keys[start_key] < window
        mask = None
        if not all_seen or not all_in_window:
            mask = seen_keys(plan.rows[start:stop], positions[start_key:stop_key], window)
        yield RowBlock(start, stop, start_key, stop_key, mask, causal=False)


FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_MAX_DIM = 256
FLASH_DIM_STEP = 8
"""Head dimensions that flash-attn computes without padding are multiples of it."""
FLASH = "flash_attn_interface"
"""The module of flash-attn 3. It exists for Hopper alone, where it reaches 631 TFLOP/s (pytorch#142132).

Version 2, whose kernels torch has, reaches 329 there."""
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Torch's attention backends on a GPU, without cuDNN.

Since 2.11, torch prefers cuDNN on Hopper and Blackwell. It builds a plan for each new number of rows and keys, in 23 to
440 ms (modelscope/FunASR#3704). Passages and prompts differ in length, and each step of decoding has one more key. On a
B200 cuDNN also gave wrong results (pytorch#193893).
"""


def dense_attention_name(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the attention that full prefill uses on a device: flash-attn 3, or torch's own."""
    return "flash-attn 3" if _has_flash(device, dtype) else "torch's fused attention"


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attend with `[B, Hq, R, D]` to R keys, each row to those up to its own position; return `[B, Hq, R, Dv]`."""
    dim = query.shape[-1]
    fits = value.shape[-1] == dim <= FLASH_MAX_DIM and dim % FLASH_DIM_STEP == 0
    if fits and _has_flash(query.device, query.dtype):
        by_token = (tensor.transpose(1, 2) for tensor in (query, key, value))
        found = import_module(FLASH).flash_attn_func(*by_token, softmax_scale=scaling, causal=True)
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


def _has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or dtype not in FLASH_DTYPES or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return _is_installed()


@cache
def _is_installed() -> bool:
    if find_spec(FLASH) is None:
        return False
    try:
        import_module(FLASH)
    except Exception:  # a build for another torch or CUDA can raise any error
        return False
    return True


ATTENTION_NAME = "qcfuse"

UNKNOWN_WINDOW = -1
"""The sliding window of models that do not pass one to attention."""

UNSUPPORTED_ARGUMENTS = ("position_bias", "indices", "block_indices")
"""Keyword arguments of some models that change the result of attention and are not supported here."""


def register() -> None:
    """Register `attn_implementation="qcfuse"` with transformers; safe to repeat."""
    AttentionInterface.register(ATTENTION_NAME, rows_attention)
    # Without a registered mask function, transformers would pass no mask and silently compute wrong results.
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    fusion: RowsPlan | StepPlan | TablePlan | None = None,
    sliding_window: int | None = UNKNOWN_WINDOW,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with the rows of a plan; without a plan, compute transformers' own attention.

    Queries are `[1, Hq, R, D]`, rotated, and keys and values `[1, Hkv, length, D]` of every position of the prompt so
    far. For a plan of several requests queries are `[B, Hq, R, D]`; keys and values are read from their buffers. With a
    plan the mask is ignored. The other arguments are those that models pass: the scale, `D ** -0.5` if None; the window
    in tokens, the plan's if the model passes none; the cap on scores through tanh (Gemma 2); `[Hq]` sink logits that
    take part in the softmax only (gpt-oss). The result is `[1, R, Hq, Dv]`, and None for the weights.

    A layer that reads another layer's keys and values finds them where that layer does, and nothing observes it. A
    model may give it queries of the last rows alone, those whose logits are wanted (Gemma 4).

    Raises:
        UnsupportedModel: if the model passes an unsupported argument, or does not pass the plan on.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if fusion is None:
        if attention_mask is not None and attention_mask.shape[-2:] == (1, 1) and key.shape[2] > 1:
            raise UnsupportedModel(
                f"the model's layers do not pass their keyword arguments to {type(module).__name__}, which therefore "
                "cannot know which keys a row sees"
            )
        params = AttentionParams(scaling, softcap, sinks=s_aux)
        if _is_plain(params):
            with chosen_backends(query.device):
                out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
            return out, None
        mask = _causal(query, key) if attention_mask is None else attention_mask[..., : key.shape[2]]
        return explicit_attention(query, key, value, mask, params).transpose(1, 2).contiguous(), None

    unsupported = [name for name in UNSUPPORTED_ARGUMENTS if kwargs.get(name) is not None]
    if unsupported:
        raise UnsupportedModel(f"{type(module).__name__} attends by {', '.join(unsupported)}, which is not supported")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    own_layers = layer + 1 if fusion.windows is None else len(fusion.windows)
    shares = layer >= own_layers
    if shares:
        layer = shared_layer(module.config, layer, own_layers)
        if isinstance(fusion, RowsPlan) and query.shape[2] < len(fusion.rows):
            fusion = fusion.last(query.shape[2])
    planned = None if fusion.windows is None else fusion.windows[layer]
    window = planned if sliding_window == UNKNOWN_WINDOW else sliding_window
    params = AttentionParams(scaling, softcap, window, s_aux)
    if isinstance(fusion, StepPlan):
        return _step_attention(module, query, fusion, layer, params), None
    if fusion.observe is not None and not shares:
        fusion.observe(layer, query, key, params)
    if isinstance(fusion, TablePlan):
        from qcfuse_rag.runtime.kernels.table_attention import table_attention

        return table_attention(query, fusion.table, layer, fusion.rows, params), None
    visible = fusion.visible_at(layer)
    if visible is not None:
        key, value = key.index_select(2, visible), value.index_select(2, visible)
    sparse = len(fusion.rows) < fusion.length
    if visible is None and sparse and supports_kernels(query, value):
        from qcfuse_rag.runtime.kernels.sparse_attention import sparse_attention

        return sparse_attention(query, key, value, fusion.rows, params), None
    outputs = []
    for block in row_blocks_of(fusion, layer, window):
        q = query[:, :, block.start : block.stop]
        k, v = key[:, :, block.start_key : block.stop_key], value[:, :, block.start_key : block.stop_key]
        if _is_plain(params):
            outputs.append(_fast_attention(q, k, v, block, scaling))
        else:
            outputs += _explicit_block(q, k, v, block, params)
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return out.transpose(1, 2).contiguous(), None  # some models call `view` on the result


def _is_plain(params: AttentionParams) -> bool:
    return params.softcap is None and params.sinks is None


def _step_attention(module: nn.Module, query: Tensor, plan: StepPlan, layer: int, params: AttentionParams) -> Tensor:
    """Attend with one row of each request to the keys in its buffer; return `[B, 1, Hq, Dv]`."""
    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = getattr(module, "expand_kv", None)
    outputs = []
    for index, (buffer, position) in enumerate(zip(plan.buffers, plan.positions, strict=True)):
        stop = position + 1
        start = 0 if params.window is None else max(0, stop - params.window)
        row_query = query[index : index + 1]
        key, value = (side[layer][:, :, start:stop] for side in (buffer.keys, buffer.values))
        if expand is not None:  # a buffer of latents
            key, value = expand(value, key)
        block = RowBlock(0, 1, start, stop, mask=None, causal=False)
        if not _is_plain(params):
            out = explicit_attention(row_query, key, value, None, params)
        elif stop - start >= LONG_KEYS and key.dtype == torch.bfloat16 and key.is_cpu and products_attend_faster():
            out = _attend_by_products(row_query, key, value, params.scaling)
        else:
            out = _fast_attention(row_query, key, value, block, params.scaling)
        outputs.append(out.transpose(1, 2))
    return torch.cat(outputs).contiguous()


@cache
def products_attend_faster() -> bool:
    """Return whether products attend faster here: .7 of the time on an EPYC with AVX512-BF16, 3 on a Xeon with AMX."""
    query, keys = (torch.randn(1, heads, rows, 64).bfloat16() for heads, rows in ((9, 1), (3, LONG_KEYS)))
    fused = partial(_fast_attention, query, keys, keys, RowBlock(0, 1, 0, LONG_KEYS, mask=None, causal=False), 0.1)
    return takes_at_most(WORTH, fused, lambda: partial(_attend_by_products, query, keys, keys, 0.1))


def _attend_by_products(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attend with one row by oneDNN's products, which read bfloat16 keys faster than torch's fused attention.

    Products are rounded to bfloat16, so a score near the largest is subtracted first: what matters is then near 0.
    """
    batch, heads, rows, _ = query.shape
    keys, values = key.flatten(0, 1), value.flatten(0, 1)
    queries = query.reshape(len(keys), -1, query.shape[-1]).mT.contiguous()
    large = (keys[:, ::SAMPLED_KEYS] @ queries).amax(1, keepdim=True)
    scores = torch.baddbmm(large, keys, queries, beta=-1).mT.float().mul_(scaling)
    return (scores.softmax(-1).to(value.dtype) @ values).view(batch, heads, rows, -1)


def _fast_attention(query: Tensor, key: Tensor, value: Tensor, block: RowBlock, scaling: float) -> Tensor:
    """Run fused attention on one block, without repeating keys over the heads of a group."""
    if block.causal:
        return causal_attention(query, key, value, scaling)
    batch, heads, rows, dim = query.shape
    kv_heads = key.shape[1]
    mask = None if block.mask is None else block.additive(query.dtype, heads // kv_heads)
    # A group's query heads become rows and share one read of the keys.
    out = torch_attention(query.reshape(batch, kv_heads, -1, dim), key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, rows, value.shape[-1])


def _explicit_block(
    query: Tensor, key: Tensor, value: Tensor, block: RowBlock, params: AttentionParams
) -> list[Tensor]:
    """Run the slow path on one block; the rows of full prefill go in parts, to bound memory."""
    if not block.causal:
        return [explicit_attention(query, key, value, block.mask, params)]
    outputs = []
    for start in range(0, query.shape[2], ROWS_PER_BLOCK):
        part_query = query[:, :, start : start + ROWS_PER_BLOCK]
        stop = start + part_query.shape[2]
        k, v = key[:, :, :stop], value[:, :, :stop]
        outputs.append(explicit_attention(part_query, k, v, _causal(part_query, k), params))
    return outputs


def _causal(query: Tensor, key: Tensor) -> Tensor:
    rows, keys = query.shape[2], key.shape[2]
    return torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)
