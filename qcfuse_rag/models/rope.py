"""Rotary position embedding (RoPE): rotating keys as a model does.

Stored keys are *unrotated*: as they would be at position 0. RoPE is a rotation by an angle linear in the position, so
one rotation moves a stored key to any place in a prompt. Where a model scales its keys as well (yarn), the factor is
the same at every position and stays inside the stored key (source: Su et al., RoFormer, arXiv 2104.09864, eq. 34).
How a model rotates is measured, see `models.rope_probe`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerRope:
    """How one layer rotates its keys.

    Attributes:
        inv_freq: `[rot_dim // 2]` float32, radians per position of each channel pair; None for a layer without RoPE.
        interleaved: True if channels (2i, 2i + 1) form a pair, False if (i, i + rot_dim / 2) do.
    """

    inv_freq: Tensor | None
    interleaved: bool = False

    def describe(self) -> str:
        """Return a short name for reports, such as `half-split, 64 channels`."""
        if self.inv_freq is None:
            return "no position"
        return f"{'interleaved' if self.interleaved else 'half-split'}, {2 * len(self.inv_freq)} channels"


@dataclass(frozen=True, slots=True)
class KVShape:
    """Sizes of one layer's cache: `kv_heads`, `key_dim` and `value_dim` channels per head."""

    kv_heads: int
    key_dim: int
    value_dim: int


def angles(inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the rotation at each position.

    Args:
        inv_freq: `[rot_dim // 2]` float32.
        positions: `[T]` integers; negative ones rotate backwards.

    Returns:
        Two `[T, rot_dim // 2]` float32 tensors.
    """
    phase = positions.to(torch.float32)[:, None] * inv_freq[None, :]
    return phase.cos(), phase.sin()


AngleTables = dict[tuple[int, int, int], tuple[Tensor, Tensor]]
"""Cosines and sines by the identity of a rotation's frequencies, which layers mostly share, and by positions."""


def angles_from(
    tables: AngleTables, rope: LayerRope, start: int, stop: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return what `angles` does at positions `start <= p < stop`, computed once for all layers that rotate alike.

    Args:
        tables: while the model is held; added to.
        rope: of a layer that rotates.
        start: first position.
        stop: position after the last.
        device: where to.
    """
    assert rope.inv_freq is not None
    name = (id(rope.inv_freq), start, stop)
    if name not in tables:
        tables[name] = angles(rope.inv_freq.to(device), torch.arange(start, stop, device=device))
    return tables[name]


def rotate(keys: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate keys by the given angles.

    Args:
        keys: `[..., T, D]`, any float dtype; computed in float32, returned in the input dtype.
        cos: `[T, rot_dim // 2]` float32, with `rot_dim <= D`; channels past `rot_dim` are left alone.
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
    """Copy keys and rotate them like `rotate`; in place where all is float32, while they are in the processor's cache.

    Args:
        out: `[..., T, D]`, any strides; apart from `keys`.
        keys: `[..., T, D]` on the same device, repeated for the dimensions of `out` it lacks.
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
    first, second = (out[..., one] for one in pairs)
    unrotated = first.clone()
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(unrotated, sin)
