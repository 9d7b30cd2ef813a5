"""Round weights while transformers loads a model, so that the model is never in memory in its dtype."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from qcfuse_rag.models.weights.formats import HeldFormat, refuse_large_weight, round_module

ONE_AT_A_TIME = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable by which transformers reads a weight when its turn comes, not as many ahead as it can."""


@contextmanager
def rounding_while_loading(weights: HeldFormat) -> Iterator[dict[nn.Module, nn.Module]]:
    """Round the weights of linear layers and embeddings as this thread's models are given them, until the block ends.

    A layer keeps its weight on the meta device, without memory.

    Args:
        weights: format to round to; `model` changes nothing.

    Yields:
        The layers whose weights were taken, and for each the rounded layer; pass them to `round_weights`.

    Raises:
        UnsupportedModel: if weights are too large for the format.
    """
    rounded: dict[nn.Module, nn.Module] = {}
    if weights == "model":
        yield rounded
        return
    thread = threading.get_ident()

    def take(module: nn.Module, name: str, weight: nn.Parameter) -> nn.Parameter | None:
        kept = module._parameters.get(name)
        if (
            threading.get_ident() != thread
            or name != "weight"
            or kept is None
            or not kept.is_meta
            or type(weight.data) is not torch.Tensor
            or weight.is_meta
            or not weight.is_floating_point()
            or any(other is not None and other.is_meta for key, other in module._parameters.items() if key != name)
        ):
            return None
        refuse_large_weight("the model", weight, weights)
        module._parameters[name] = weight
        replacement = round_module(module, weights)
        module._parameters[name] = kept
        if replacement is None:
            return None
        rounded[module] = replacement
        kept._is_hf_initialized = True  # type: ignore[attr-defined]  # as transformers marks the weights that it loaded
        return kept

    before = os.environ.get(ONE_AT_A_TIME)
    os.environ[ONE_AT_A_TIME] = "1"
    hook = register_module_parameter_registration_hook(take)  # type: ignore[arg-type]  # torch types them without result
    try:
        yield rounded
    finally:
        hook.remove()
        if before is None:
            del os.environ[ONE_AT_A_TIME]
        else:
            os.environ[ONE_AT_A_TIME] = before
