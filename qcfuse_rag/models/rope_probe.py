"""Measure how each layer of a model rotates its keys.

The configuration is not trusted for which layers rotate, with which frequencies, and which channels are paired. A token
that sees only itself has the same hidden states at every position. So its keys at two positions differ by the rotation
alone, at every layer (see `models.rope`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from qcfuse_rag.errors import UnsupportedModel
from qcfuse_rag.models.rope import KVShape, LayerRope, angles, rotate

PROBE_POSITIONS = (0, 1, 37, 911)


@torch.inference_mode()
def measure_rope(model: PreTrainedModel, max_position: int) -> tuple[tuple[LayerRope, ...], tuple[KVShape, ...]]:
    """Measure each layer's rotation and cache shape by running one token at four positions.

    Args:
        model: a decoder-only model as transformers loads it, with its own attention.
        max_position: highest position the model accepts.

    Raises:
        UnsupportedModel: if a layer keeps no keys, moves them by anything but a known rotation, or moves values.
    """
    device = model.get_input_embeddings().weight.device
    positions = torch.tensor([min(p, max_position) for p in PROBE_POSITIONS], device=device)
    token = model.get_input_embeddings().num_embeddings // 2
    ids = torch.full((len(positions), 1), token, device=device)
    cache = Cache(layer_class_to_replicate=DynamicLayer)
    model.get_decoder()(input_ids=ids, position_ids=positions[:, None], past_key_values=cache, use_cache=True)

    n_layers = model.config.get_text_config().num_hidden_layers
    if len(cache.layers) != n_layers or any(not layer.is_initialized for layer in cache.layers):
        raise UnsupportedModel(f"{len(cache.layers)} of {n_layers} layers keep keys and values of their own")
    candidates = [LayerRope(None), *_candidates(model)]
    ropes, shapes = [], []
    for index, layer in enumerate(cache.layers):
        keys = layer.keys[:, :, 0].transpose(0, 1)  # [Hkv, 4, D], one row per position
        values = layer.values[:, :, 0]
        if float((values - values[:1]).abs().max()) > _tolerance(keys) * float(values.abs().max()):
            raise UnsupportedModel(
                f"the values of layer {index} depend on the token's position, as with learned positions or latent "
                "attention, so they cannot be placed anywhere else; take a model with rotary positions"
            )
        ropes.append(_match(keys, positions, candidates, index))
        shapes.append(KVShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]))
    return tuple(ropes), tuple(shapes)


def _candidates(model: PreTrainedModel) -> list[LayerRope]:
    """Return every possible rotation: each frequency table of the model's rotary modules, in both pairings."""
    candidates: list[LayerRope] = []
    for name, table in model.named_buffers():
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq"):
            frequencies = table.detach().to(torch.float32)
            candidates += [LayerRope(frequencies, interleaved) for interleaved in (False, True)]
    return candidates


def _match(keys: Tensor, positions: Tensor, candidates: list[LayerRope], layer: int) -> LayerRope:
    """Return the candidate that rotates the keys at position 0 to the keys at the other positions."""
    at_zero = keys[:, :1].expand_as(keys).to(torch.float32)
    size = at_zero.abs().amax().clamp_min(1e-12)
    best, best_error = candidates[0], float("inf")
    for rope in candidates:
        if rope.inv_freq is not None and 2 * len(rope.inv_freq) > keys.shape[-1]:
            continue
        moved = at_zero
        if rope.inv_freq is not None:
            moved = rotate(at_zero, *angles(rope.inv_freq, positions), interleaved=rope.interleaved)
        error = float((moved - keys.to(torch.float32)).abs().amax() / size)
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
