"""Whether a layer's stand-in computes what the layer does, as far as random numbers tell.

Both are run with a witness for a cache and for attention, so that what each is given is seen as well. A stand-in may be
off by what the layer itself, rounding as it does, is off from itself in a wider dtype: no one figure fits all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qcfuse_rag.runtime.fused_layers.fused_modules import LARGE, SMALL, seeing, view_of

INTERFACES = "ALL_ATTENTION_FUNCTIONS"
"""Where transformers' models look up the function that attends."""
REQUESTS, BEHIND = 4, 100_000
"""To be compared, with a row of each scale, and where they stand: some models scale queries by their position."""
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}
MORE, LEAST = 3.0, 1e-6
"""A stand-in's error may be so many times the layer's own, and this."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerCheck:
    """What a layer makes of some rows.

    Attributes:
        hidden: `[B, R, H]`, rows of different scales.
        angles: cosine and sine of the rows' rotation, `[1, R, D]`.
        expected: what it made in a wider dtype, and what its cache and its attention were given: `[.., R, ..]` each.
        allowed: of each the relative error that each row may have, `[R]`.
        how: by what its attention attends besides what it is handed through.
    """

    hidden: Tensor
    angles: tuple[Tensor, Tensor]
    expected: tuple[Tensor, ...]
    allowed: tuple[Tensor, ...]
    how: dict[str, Any]

    @classmethod
    def of(cls, layer: nn.Module, width: int, dim: int) -> LayerCheck:
        """Run a layer.

        Args:
            layer: of a decoder of transformers, whose attention rotates.
            width: H.
            dim: channels of a head.
        """
        weight = next(layer.parameters())
        generator = torch.Generator(weight.device).manual_seed(0)
        scales = torch.tensor(SMALL + LARGE, device=weight.device)[:, None]
        hidden = torch.randn(REQUESTS, len(scales), width, generator=generator, device=weight.device) * scales
        turns = torch.randn(1, len(scales), dim // 2, generator=generator, device=weight.device).repeat(1, 1, 2)
        hidden, cos, sin = (one.to(weight.dtype) for one in (hidden, turns.cos(), turns.sin()))
        wide = WIDER[weight.dtype]
        witness, own = _Witness(cos.to(wide), sin.to(wide)), _Witness(cos, sin)
        expected = witness.saw(_watched(_in(wide, layer), witness), hidden.to(wide))
        found = own.saw(_watched(layer, own), hidden)
        allowed = tuple(MORE * _errors(*pair) + LEAST for pair in zip(found, expected, strict=True))
        return cls(hidden, (cos, sin), expected, allowed, own.how)

    def met_by(self, stand_in: Callable[[Callable[..., Any]], nn.Module]) -> bool:
        """Return whether a stand-in, made with a function that attends, makes the same."""
        witness = _Witness(*self.angles)
        found = witness.saw(stand_in(witness.attend), self.hidden)
        return all(
            one.shape == two.shape and bool((_errors(one, two) <= allowed).all())  # NaN is not
            for one, two, allowed in zip(found, self.expected, self.allowed, strict=True)
        )


class _Witness:
    """Takes the place of a layer's cache and of its attention, in which each row sees itself alone."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        behind = torch.arange(BEHIND, BEHIND + cos.shape[1], device=cos.device).expand(REQUESTS, -1)
        self._given = {
            "attention_mask": None,
            "position_ids": behind,
            "past_key_values": self,
            "use_cache": True,
            "position_embeddings": (cos, sin),
            "fusion": self,
        }
        self._seen: tuple[Tensor, ...] = ()
        self._kept: tuple[Tensor, ...] = ()
        self.how: dict[str, Any] = {}

    def saw(self, layer: nn.Module, hidden: Tensor) -> tuple[Tensor, ...]:
        """Run a layer; return what it made, and what its cache and its attention were given, `[B, R, ..]` each."""
        made = layer(hidden, **self._given)
        return (made, *(one.transpose(1, 2) for one in (*self._kept, *self._seen)))

    def update(self, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Be the cache."""
        self._kept = key, value
        return key, value

    def get_interface(self, *_: Any) -> Callable[..., Any]:
        """Be where the function that attends is looked up."""
        return self.attend

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **how: Any
    ) -> tuple[Tensor, None]:
        """Attend, and remember what is asked for besides what was handed through."""
        if how.get("fusion") is not self:
            raise ValueError("attention is not given what layers are")
        self.how = {name: one for name, one in how.items() if name not in self._given}
        self._seen = query, key, value
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None


def _in(dtype: torch.dtype, module: nn.Module) -> nn.Module:
    """Return a module that computes in another dtype, the module itself left as it is."""
    parts = {name: None if child is None else _in(dtype, child) for name, child in module._modules.items()}
    view = view_of(module, parts)
    for kind in ("_parameters", "_buffers"):
        held = {name: one.to(dtype) if isinstance(one, Tensor) else one for name, one in getattr(module, kind).items()}
        setattr(view, kind, held)
    return view


def _watched(layer: nn.Module, witness: _Witness) -> nn.Module:
    """Return a view of a layer whose attention asks a witness."""
    attention: Any = layer.self_attn
    view = view_of(attention, attention._modules, seeing(type(attention).forward, **{INTERFACES: witness}))
    return view_of(layer, {**layer._modules, "self_attn": view})


def _errors(found: Tensor, expected: Tensor) -> Tensor:
    """Return the largest relative error of each row, over requests and heads: `[R]`."""
    off, size = (one.double().norm(dim=-1) for one in (found - expected, expected))
    errors: Tensor = off / size
    return errors.amax([place for place in range(errors.dim()) if place != 1])
