"""Rotary position embedding (RoPE): rotate keys as a model does.

Stored keys are *unrotated*: as they would be at position 0. RoPE rotates by an angle linear in the position, so one
rotation moves a stored key to any position in a prompt (Su et al., RoFormer, arXiv 2104.09864, eq. 34). If a model also
scales its keys (yarn), the factor is the same at every position and stays inside the stored key. `models.rope_probe`
measures a model's rotation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerRope:
    """The rotation of one layer's keys.

    Attributes:
        inv_freq: `[rot_dim // 2]` float32, radians per position for each channel pair; None for a layer without RoPE.
        interleaved: True if channels (2i, 2i + 1) form a pair, False if (i, i + rot_dim / 2) do.
    """

    inv_freq: Tensor | None
    interleaved: bool = False

    def rotated(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Return keys rotated to positions; the keys themselves if the layer has no rotation.

        Args:
            keys: `[..., T, D]`, see `rotate`.
            positions: `[T]` integers on the keys' device; negative ones rotate backwards.
        """
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
    """The shape of one layer's cache: number of heads, and key and value channels per head."""

    kv_heads: int
    key_dim: int
    value_dim: int


def angles(inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of the rotation angle at each position.

    Args:
        inv_freq: `[rot_dim // 2]` float32.
        positions: `[T]` integers; negative ones rotate backwards.

    Returns:
        Two `[T, rot_dim // 2]` float32 tensors.
    """
    phase = positions.to(torch.float32)[:, None] * inv_freq[None, :]
    return phase.cos(), phase.sin()


AngleTables = dict[tuple[int, int, int], tuple[Tensor, Tensor]]
"""Cosines and sines, by the identity of the `inv_freq` tensor, which most layers share, and by start and stop."""


def angles_from(
    tables: AngleTables, rope: LayerRope, start: int, stop: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return `angles` at positions `start <= p < stop`, computed once for all layers with the same rotation.

    Args:
        tables: the computed angles; extended here. Valid as long as the model exists.
        rope: rotation of a layer that has one.
        start: first position.
        stop: position after the last.
        device: device of the result.
    """
    assert rope.inv_freq is not None
    table = (id(rope.inv_freq), start, stop)
    if table not in tables:
        tables[table] = angles(rope.inv_freq.to(device), torch.arange(start, stop, device=device))
    return tables[table]


def rotate(keys: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate keys by the given angles.

    Args:
        keys: `[..., T, D]`, any float dtype; the computation is in float32, the result in the input dtype.
        cos: `[T, rot_dim // 2]` float32, with `rot_dim <= D`; channels past `rot_dim` stay unchanged.
        sin: same shape as `cos`.
        interleaved: channel pairing, see `LayerRope`.

    Returns:
        `[..., T, D]`, a new tensor.
    """
    half = cos.shape[-1]
    out = keys.to(torch.float32, copy=True)
    if interleaved:
        first, second = out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2]
    else:
        first, second = out[..., :half], out[..., half : 2 * half]
    rotated_first = first * cos - second * sin
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated_first)
    return out.to(keys.dtype)


def rotate_into(out: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
    """Copy keys and rotate them like `rotate`; float32 keys are rotated in place while they are in the CPU cache.

    Args:
        out: `[..., T, D]`, any strides; must not overlap `keys`.
        keys: `[..., T, D]` on the same device, broadcast to `out`.
        cos: `[T, rot_dim // 2]` float32.
        sin: same shape as `cos`.
        interleaved: channel pairing, see `LayerRope`.
    """
    if keys.dtype != torch.float32 or out.dtype != torch.float32:
        out.copy_(rotate(keys, cos, sin, interleaved=interleaved))
        return
    out.copy_(keys)
    half = cos.shape[-1]
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    first, second = (out[..., channels] for channels in pairs)
    unrotated = first.clone()
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(unrotated, sin)
