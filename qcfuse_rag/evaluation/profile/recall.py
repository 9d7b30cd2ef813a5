"""How much of the answer each layer's attention finds: Recall@10 %."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.prompts.segments import Prompt, Role
from qcfuse_rag.runtime.attention.scores import attention_weights
from qcfuse_rag.runtime.forward import forward_hidden
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.rows import RowsPlan

SHARE = 0.1
"""The best tokens that count as found, as a share of all tokens of the passages."""


@torch.inference_mode()
def attention_by_layer(lm: LanguageModel, prompt: Prompt) -> Tensor:
    """Prefill a prompt in full and return what its question looks at in every layer.

    The asking rows are those of a probe over stored passages, see `FusedPrompt.probe_rows`. Nothing is reused here, so
    this is what a probe would see of perfect caches.

    Args:
        lm: the model.
        prompt: with passages; at most as long as the context window.

    Returns:
        `[n_layers, T]` float32 on the CPU: the attention each position gets, mean over heads and asking rows.
    """
    assembly = FusedPrompt.empty(lm, prompt, len(prompt))
    for span in prompt.spans:
        if span.segment.role in (Role.HEAD, Role.CHUNK):
            assembly.known[span.start : span.stop] = True
    asking = assembly.probe_rows()
    length = int(asking[-1]) + 1  # what comes after the last asking row is seen by none
    asking = asking.to(lm.device)
    everything = torch.ones(length, dtype=torch.bool, device=lm.device)
    found = torch.zeros(lm.n_layers, len(prompt))

    def observe(
        layer: int, query: Tensor, key: Tensor, scaling: float, softcap: float | None, window: int | None
    ) -> None:
        weights = attention_weights(
            query[:, :, asking], key, asking, everything, scaling=scaling, softcap=softcap, window=window
        )
        found[layer, :length] = weights.cpu()

    plan = RowsPlan.between(0, length, lm.device, lm.sliding, observe)
    forward_hidden(lm, assembly.ids[:length], plan, assembly.buffer, depth=lm.n_layers)
    return found


def recall_by_layer(attention: Tensor, candidates: Sequence[int], targets: Sequence[int]) -> Tensor:
    """Return for each layer the share of the targets among the best tenth of the candidates.

    Args:
        attention: `[n_layers, T]`.
        candidates: positions of the passages' tokens.
        targets: positions of the answer's, not empty, all of them candidates.

    Returns:
        `[n_layers]` float64, 0 to 1. Less than 1 at best where the targets are more than a tenth of the candidates.
    """
    places = torch.tensor(candidates)
    wanted = torch.isin(places, torch.tensor(targets))
    count = max(1, int(SHARE * len(places)))
    best = attention[:, places].argsort(dim=1, descending=True, stable=True)[:, :count]
    return wanted[best].sum(1).double() / len(targets)
