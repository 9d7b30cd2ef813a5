"""Measure whether a model uses the sliding windows of its configuration.

A configuration may have a window that the model's class never reads, left from another class or written by a training
framework. So it is measured: a model that uses its window gives different hidden states with another window.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qcfuse_rag.errors import UnsupportedModel
from qcfuse_rag.models.compatibility import sliding_windows

PROBE_TOKENS, PROBE_WINDOW = 24, 4


@torch.inference_mode()
def measure_windows(model: PreTrainedModel) -> tuple[int | None, ...]:
    """Return each layer's sliding window in tokens; None for full attention.

    If the configuration has a window, some tokens are run three times, the third time with a narrow window. This uses
    the attention `eager`, which applies windows by the mask alone.

    Args:
        model: a decoder-only model as transformers loads it.

    Raises:
        UnsupportedModel: if nothing changes although the model's layers have a window.
    """
    config = model.config.get_text_config()
    windows = sliding_windows(config)
    if not any(windows):
        return windows
    embeddings = model.get_input_embeddings()
    n_tokens = min(PROBE_TOKENS, int(config.max_position_embeddings))
    ids = (7 + 31 * torch.arange(n_tokens, device=embeddings.weight.device)) % embeddings.num_embeddings

    def hidden() -> Tensor:
        state: Tensor = model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state
        return state.float()

    window, attention = config.sliding_window, config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        first, again = hidden(), hidden()
        config.sliding_window = PROBE_WINDOW if window != PROBE_WINDOW else 1
        narrow = hidden()
    finally:
        config.sliding_window = window
        model.set_attn_implementation(attention)
    noise = (again - first).abs().max()
    if (narrow - first).abs().max() > 2 * noise:
        return windows
    if any(getattr(module, "sliding_window", None) for module in model.get_decoder().modules()):
        raise UnsupportedModel(
            f"whether {type(model).__name__} attends in a window of {window:,} tokens cannot be told: its layers have "
            "one, but another window in the configuration changes nothing"
        )
    return (None,) * len(windows)
