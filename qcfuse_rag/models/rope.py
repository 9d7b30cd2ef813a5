"""Rotary position embedding (RoPE): rotate keys as a model does.

Stored keys are *unrotated*: as they would be at position 0. RoPE rotates by an angle linear in the position, so one
rotation moves a stored key to any position in a prompt (Su et al., RoFormer, arXiv 2104.09864, eq. 34). If a model also
scales its keys (yarn), the factor is the same at every position and stays inside the stored key. The
configuration is not trusted for which layers rotate, with which frequencies, and which channels are paired. A token
that sees only itself has the same hidden states at every position. So its keys at two positions differ by the rotation
alone, at every layer: `measure_rope`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qcfuse_rag.errors import UnsupportedModel

if TYPE_CHECKING:  # a store imports this without a model; transformers imports slowly
    from torch import nn
    from transformers import PreTrainedModel


@cache
def cache_argument() -> str:
    """Return the name of the models' argument for keys and values; transformers 5.24 has renamed it."""
    return "cache" if tuple(map(int, version("transformers").split(".")[:2])) >= (5, 24) else "past_key_values"


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the module with the layers; transformers' `get_decoder` returns Llama4ForCausalLM itself."""
    decoder: nn.Module = model.get_decoder()
    return getattr(decoder, "model", decoder) if decoder is model else decoder


@dataclass(frozen=True, slots=True, eq=False)
class LayerRope:
    """The rotation of one layer's keys.

    `inv_freq` is `[rot_dim // 2]` float32, radians per position for each channel pair; None for a layer without RoPE.
    `interleaved` is True if channels (2i, 2i + 1) form a pair, False if (i, i + rot_dim / 2) do.
    """

    inv_freq: Tensor | None
    interleaved: bool = False

    def rotated(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Return `[..., T, D]` keys rotated to `[T]` positions; the keys themselves if the layer has no rotation."""
        if self.inv_freq is None:
            return keys
        return rotate(keys, *angles(self.inv_freq.to(keys.device), positions), interleaved=self.interleaved)

    def describe(self) -> str:
        """Return a short name for reports, such as `half-split, 64 channels`."""
        if self.inv_freq is None:
            return "no position"
        return f"{'interleaved' if self.interleaved else 'half-split'}, {2 * len(self.inv_freq)} channels"


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of one layer's cache: number of heads, and key and value channels per head.

    If `latent`, the keys are the rotary part that all heads share, and the values the latents from which the layer
    computes the rest of the keys, and the values (DeepSeek-V2, arXiv 2405.04434, section 2.1).
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False


def angles(inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, `[T, rot_dim // 2]` float32, of the angles at `[T]` integer positions.

    `inv_freq` is `[rot_dim // 2]` float32. Negative positions rotate backwards.
    """
    phase = positions.to(torch.float32)[:, None] * inv_freq[None, :]
    return phase.cos(), phase.sin()


AngleTables = dict[tuple[int, int, int], tuple[Tensor, Tensor]]
"""Cosines and sines, by the identity of the `inv_freq` tensor, which most layers share, and by start and stop."""


def angles_from(
    tables: AngleTables, rope: LayerRope, start: int, stop: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return `angles` at positions `start <= p < stop`, computed once for all layers with the same rotation.

    `tables` has the computed angles, is extended here, and is valid as long as the model exists.
    """
    assert rope.inv_freq is not None
    table = (id(rope.inv_freq), start, stop)
    if table not in tables:
        tables[table] = angles(rope.inv_freq.to(device), torch.arange(start, stop, device=device))
    return tables[table]


def rotate(keys: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Return new keys `[..., T, D]`, rotated in float32 by angles, in the dtype of the given ones.

    `cos` and `sin` are `[T, rot_dim // 2]` float32, with `rot_dim <= D`; channels past `rot_dim` stay unchanged.
    """
    out = keys.to(torch.float32, copy=True)
    _rotate_in_place(out, cos, sin, interleaved=interleaved)
    return out.to(keys.dtype)


def rotate_into(out: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
    """Copy keys, broadcast to `out`, and rotate them like `rotate`; float32 ones in place, while in the CPU cache.

    `out` is `[..., T, D]`, has any strides and must not overlap `keys`.
    """
    if keys.dtype != torch.float32 or out.dtype != torch.float32:
        out.copy_(rotate(keys, cos, sin, interleaved=interleaved))
        return
    out.copy_(keys)
    _rotate_in_place(out, cos, sin, interleaved=interleaved)


def _rotate_in_place(keys: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
    half = cos.shape[-1]
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    first, second = (keys[..., channels] for channels in pairs)
    unrotated = first.clone()
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(unrotated, sin)


PROBE_POSITIONS = (0, 1, 37, 911)


@torch.inference_mode()
def measure_rope(
    model: PreTrainedModel, max_position: int, n_layers: int, others: Mapping[int, KVShape] | None = None
) -> tuple[tuple[LayerRope, ...], tuple[KVShape, ...]]:
    """Measure each layer's rotation and cache shape by running one token at four positions up to `max_position`.

    The first `n_layers` have keys of their own, or are `others`, whose shapes are given and which have no rotation.

    Raises:
        UnsupportedModel: if another layer keeps no keys, moves them by anything but a known rotation, or moves values.
    """
    from transformers import Cache
    from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

    device = model.get_input_embeddings().weight.device
    positions = torch.tensor([min(p, max_position) for p in PROBE_POSITIONS], device=device)
    token = model.get_input_embeddings().num_embeddings // 2
    ids = torch.full((len(positions), 1), token, device=device)
    others = others or {}
    kv = Cache(layers=[LinearAttentionLayer() if index in others else DynamicLayer() for index in range(n_layers)])
    decoder_of(model)(input_ids=ids, position_ids=positions[:, None], use_cache=True, **{cache_argument(): kv})

    if any(not layer.is_initialized for index, layer in enumerate(kv.layers) if index not in others):
        raise UnsupportedModel(f"{len(kv.layers)} of {n_layers} layers keep keys and values of their own")
    candidates = [LayerRope(None), *_candidates(model)]
    latent = {module.layer_idx for module in decoder_of(model).modules() if hasattr(module, "expand_kv")}
    ropes, shapes = [], []
    for index, layer in enumerate(kv.layers):
        if index in others:
            ropes.append(LayerRope(None))
            shapes.append(others[index])
            continue
        keys, values = (side[:, :, 0].transpose(0, 1) for side in (layer.keys, layer.values))  # [Hkv, 4, D]
        if index in latent:
            keys, values = values, keys
        if float((values - values[:, :1]).abs().max()) > _tolerance(keys) * float(values.abs().max()):
            raise UnsupportedModel(
                f"the values of layer {index} depend on the token's position, as with learned positions, so they "
                "cannot be placed anywhere else; take a model with rotary positions"
            )
        ropes.append(_match(keys, positions, candidates, index))
        shapes.append(KVShape(keys.shape[0], keys.shape[2], values.shape[2], index in latent))
    return tuple(ropes), tuple(shapes)


def _candidates(model: PreTrainedModel) -> list[LayerRope]:
    """Return every possible rotation: each frequency table of the model's rotary modules, in both pairings."""
    tables = (
        table.detach().to(torch.float32)
        for name, table in model.named_buffers()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    )
    return [LayerRope(table, interleaved) for table in tables for interleaved in (False, True)]


def _match(keys: Tensor, positions: Tensor, candidates: list[LayerRope], layer: int) -> LayerRope:
    """Return the candidate that rotates the keys at position 0 to the keys at the other positions."""
    at_zero = keys[:, :1].expand_as(keys).to(torch.float32)
    size = at_zero.abs().amax().clamp_min(1e-12)
    best, best_error = candidates[0], float("inf")
    for rope in candidates:
        if rope.inv_freq is not None and 2 * len(rope.inv_freq) > keys.shape[-1]:
            continue
        error = float((rope.rotated(at_zero, positions) - keys.to(torch.float32)).abs().amax() / size)
        if error < best_error:
            best, best_error = rope, error
    if best_error > _tolerance(keys):
        raise UnsupportedModel(
            f"layer {layer} does not move its keys by a rotation this library knows (the closest is off by "
            f"{best_error:.1%}), so stored keys cannot be placed anywhere else"
        )
    return best


def _tolerance(keys: Tensor) -> float:
    return 1e-3 if keys.dtype == torch.float32 else 3e-2
