"""Each layer's sliding window, believed only where it is obeyed.

A configuration may have a window that the model's class never looks at, left from another class or written by a
training framework. Whether it counts is not looked up: a model that obeys it gives other hidden states under another.
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
    """Return each layer's sliding window in tokens, or None where a layer sees everything before it.

    Where the configuration has one, some tokens are run three times, with a narrow window the last time, and with the
    attention `eager`, which leaves windows to the mask.

    Args:
        model: a decoder-only model as transformers loads it.

    Raises:
        UnsupportedModel: if nothing changes though the model's layers speak of a window.
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

    own, attention = config.sliding_window, config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        first, again = hidden(), hidden()
        config.sliding_window = PROBE_WINDOW if own != PROBE_WINDOW else 1
        narrow = hidden()
    finally:
        config.sliding_window = own
        model.set_attn_implementation(attention)
    noise = (again - first).abs().max()
    if (narrow - first).abs().max() > 2 * noise:
        return windows
    if any(getattr(module, "sliding_window", None) for module in model.get_decoder().modules()):
        raise UnsupportedModel(
            f"whether {type(model).__name__} attends in a window of {own:,} tokens cannot be told: its layers have "
            "one, and nothing changes with another in the configuration"
        )
    return (None,) * len(windows)
