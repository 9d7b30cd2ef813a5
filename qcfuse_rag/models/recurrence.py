"""Recurrent layers: linear attention, Mamba and short convolutions, whose state depends on the whole text before.

The state behind a text is a function of each token's inputs to the recurrence, which linear layers compute from the
token's hidden state. A layer's part of a chunk is these inputs, as keys and values are an attention layer's: they can
be placed anywhere and recomputed token by token, and running the recurrence over them gives the state. Which channels
of which linear layers later tokens depend on is measured: a gate acts on its own token alone and is not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from qcfuse_rag.errors import UnsupportedModel
from qcfuse_rag.models.rope import KVShape, cache_argument, decoder_of

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

HEAD_DIM = 64
"""Channels of a head as which inputs are stored; a layer has an even number of such heads, half of them as keys."""
TOKENS = 9
"""Tokens of a measurement, more than any model's convolution is wide."""
CLOSE = 0.02
"""Difference of a text computed in parts, as a share of the largest output; rounding makes a fifth of it at most."""


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentLayer:
    """The mixer of a recurrent layer, and its inputs."""

    mixer: str  # name of the mixer in the decoder
    projections: tuple[str, ...]  # names in the mixer of the linear layers that read hidden states
    used: tuple[Tensor, ...]  # of each of them, `[C]` bool on the CPU, output channels that later tokens depend on
    output: str  # name in the mixer of its last linear layer
    continues: bool  # whether the mixer's own code computes several tokens behind a state; all compute one

    @property
    def n_channels(self) -> int:
        """Stored numbers a token."""
        return sum(int(used.sum()) for used in self.used)

    @property
    def shape(self) -> KVShape:
        """Form in which the inputs are stored: the first half as keys, the second half as values."""
        return KVShape(-(-self.n_channels // (2 * HEAD_DIM)), HEAD_DIM, HEAD_DIM)


def measure_recurrence(model: PreTrainedModel, layers: Sequence[int]) -> dict[int, RecurrentLayer]:
    """Find the mixers of some layers, and measure which of their inputs later tokens depend on.

    A state that decays fast may hide some of these inputs in one layer, but not in all: layers with the same linear
    layers store the same channels.

    Raises:
        UnsupportedModel: if a layer does not begin and end with linear layers, between which it keeps a state.
    """
    if not layers:
        return {}
    measured = [_measure(model, *call) for call in _mixer_calls(model, layers)]
    for layer in measured:
        for like in measured:
            if like.projections == layer.projections:
                for used, theirs in zip(layer.used, like.used, strict=True):
                    used |= theirs
    return dict(zip(layers, measured, strict=True))


class MixerCall(NamedTuple):
    """The arguments with which a layer calls its mixer: `[B, R, H]` hidden states, the cache, and others but a mask."""

    hidden: Tensor
    cache_name: str
    cache: Cache | None
    options: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MixerCall:
        """Sort the arguments of a call."""
        from transformers import Cache

        name = next((name for name, value in kwargs.items() if isinstance(value, Cache)), "")
        options = {key: value for key, value in kwargs.items() if key not in (name, "attention_mask")}
        return cls(args[0] if args else options.pop("hidden_states"), name, kwargs.get(name), options)


def _mixer_calls(model: PreTrainedModel, layers: Sequence[int]) -> list[tuple[int, str, MixerCall]]:
    """Return for each layer the name of the module that reads the cache, and its call in a pass over two tokens."""
    from transformers import DynamicCache

    decoder, calls = decoder_of(model), dict[int, tuple[int, str, MixerCall]]()
    with ExitStack() as hooks:
        for layer in layers:
            for child, module in decoder.get_submodule(f"layers.{layer}").named_children():

                def note(_: nn.Module, args: Any, kwargs: Any, layer: int = layer, child: str = child) -> None:
                    if (args or "hidden_states" in kwargs) and (call := MixerCall.of(args, kwargs)).cache is not None:
                        calls[layer] = layer, f"layers.{layer}.{child}", call

                hooks.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        ids = torch.zeros(1, 2, dtype=torch.int64, device=model.get_input_embeddings().weight.device)
        with torch.no_grad():
            decoder(input_ids=ids, use_cache=True, **{cache_argument(): DynamicCache(config=model.config)})
    if missing := sorted(set(layers) - calls.keys()):
        raise UnsupportedModel(f"layer {missing[0]} has no module of its own that reads the cache")
    return [calls[layer] for layer in layers]


def _measure(model: PreTrainedModel, layer: int, name: str, call: MixerCall) -> RecurrentLayer:
    """Run a mixer over random hidden states; find its linear layers, and the gradient of the last token's output."""
    mixer = decoder_of(model).get_submodule(name)
    hidden = torch.randn(1, TOKENS, call.hidden.shape[-1], generator=torch.Generator().manual_seed(layer))
    hidden = hidden.to(call.hidden.device, call.hidden.dtype)
    inputs, products = dict[str, Tensor](), list[tuple[str, Tensor, Tensor]]()

    def note(linear: str, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if args[0] is hidden:
            output = inputs[linear] = output.detach().clone().requires_grad_()
        else:
            products.append((linear, args[0], output))
        return output

    with torch.inference_mode(False), torch.enable_grad(), ExitStack() as hooks:
        for linear, module in mixer.named_modules():
            if hasattr(module, "in_features"):
                hook = module.register_forward_hook(lambda _, args, output, linear=linear: note(linear, args, output))
                hooks.callback(hook.remove)
        result = mixer(hidden, **call.options)
        last = next(((linear, given) for linear, given, output in products if output is result), None)
        if last is None or not inputs:
            raise UnsupportedModel(
                f"layer {layer} keeps a state of the whole preceding text and does not begin and end with linear "
                "layers, so the inputs of its recurrence cannot be told"
            )
        weights = torch.randn(last[1].shape[-1], generator=torch.Generator().manual_seed(0)).to(hidden.device)
        gradients = torch.autograd.grad(
            (last[1][0, -1].float() * weights).sum(), list(inputs.values()), allow_unused=True
        )
    used = [
        torch.zeros(values.shape[-1], dtype=torch.bool) if gradient is None else (gradient[0, :-1] != 0).any(0).cpu()
        for values, gradient in zip(inputs.values(), gradients, strict=True)
    ]
    return RecurrentLayer(name, tuple(inputs), tuple(used), last[0], _continues(mixer, layer, call, hidden))


@torch.no_grad()
def _continues(mixer: nn.Module, layer: int, call: MixerCall, hidden: Tensor) -> bool:
    from transformers import Cache
    from transformers.cache_utils import LinearAttentionLayer

    def run(lengths: list[int]) -> Tensor:
        cache = Cache(layers=[LinearAttentionLayer()] * (layer + 1))
        parts = torch.split(hidden, lengths, 1)
        return torch.cat([mixer(part, **call.options, **{call.cache_name: cache}) for part in parts], 1).float()

    whole = run([TOKENS])
    return bool((run([TOKENS // 2, TOKENS - TOKENS // 2]) - whole).abs().max() < CLOSE * whole.abs().max())
