"""Run a model over the rows of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache

from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.layer_hooks import HookedPass
from qcfuse_rag.runtime.model_views import decoder_view, model_view
from qcfuse_rag.runtime.rows import RowsPlan

if TYPE_CHECKING:
    from qcfuse_rag.runtime.kv_table import TablePlan
    from qcfuse_rag.runtime.language_model import LanguageModel
    from qcfuse_rag.runtime.rows import StepPlan


@torch.inference_mode()
def forward_rows(
    lm: LanguageModel, ids: Tensor, plan: RowsPlan, buffer: KVBuffer, hooked_pass: HookedPass | None = None
) -> Tensor:
    """Compute the plan's rows through all layers, writing their keys and values into the buffer.

    Args:
        lm: the model.
        ids: `[R]` int64 token ids of the rows.
        plan: the rows and the keys they see.
        buffer: must hold keys and values at every position that a row sees and that is not itself a row.
        hooked_pass: acts between layers, or None.

    Returns:
        `[vocabulary]` float32 logits after the last row.
    """
    model: nn.Module = lm.fused_model
    if hooked_pass is not None:
        model = model_view(model, lm.fused_model.get_decoder(), lm.n_layers, hooked_pass)
    logits = model(**model_inputs(ids, plan, buffer), logits_to_keep=1).logits
    return logits[0, -1].float()  # type: ignore[no-any-return]


@torch.inference_mode()
def forward_logits(lm: LanguageModel, ids: Tensor, plan: RowsPlan, buffer: KVBuffer, *, last: int = 0) -> Tensor:
    """Compute the plan's rows like `forward_rows`; return the `[R, vocabulary]` float32 logits after each row.

    With `last` above 0, only the logits after the last so many rows are computed and returned.
    """
    logits: Tensor = lm.fused_model(**model_inputs(ids, plan, buffer), logits_to_keep=last).logits
    return logits[0].float()


@torch.inference_mode()
def forward_hidden(
    lm: LanguageModel,
    ids: Tensor,
    plan: RowsPlan,
    buffer: KVBuffer,
    *,
    depth: int,
    hooked_pass: HookedPass | None = None,
) -> None:
    """Compute the plan's rows through the first `depth` layers only, to get their keys, values and queries.

    Args:
        lm: the model.
        ids: `[R]` token ids of the rows, or `[B, R]` of the same rows of several sequences.
        plan: the rows and the keys they see.
        buffer: of the same number of sequences.
        depth: number of layers to run.
        hooked_pass: acts between layers, or None.
    """
    decoder = lm.fused_model.get_decoder()
    if hooked_pass is not None or depth < lm.n_layers:
        decoder = decoder_view(decoder, depth, hooked_pass)
    decoder(**model_inputs(ids, plan, buffer))


def model_inputs(ids: Tensor, plan: RowsPlan, buffer: KVBuffer) -> dict[str, Any]:
    """Return the keyword arguments of a model call that computes the plan's rows over a buffer.

    Args:
        ids: `[R]` token ids of the rows, or `[B, R]` of the same rows of several sequences.
        plan: the rows and the keys they see.
        buffer: of the same number of sequences.
    """
    sequences = ids if ids.dim() == 2 else ids[None]
    return planned_inputs(sequences, plan.rows[None].expand(len(sequences), -1), buffer.cache(plan), plan)


def planned_inputs(
    ids: Tensor, positions: Tensor, cache: Cache, plan: RowsPlan | StepPlan | TablePlan
) -> dict[str, Any]:
    """Return the keyword arguments of a model call that computes the rows of a plan.

    Args:
        ids: `[B, R]` int64 token ids of the rows.
        positions: `[B, R]` int64 positions of the rows.
        cache: writes their keys and values.
        plan: the rows and the keys they see, passed on to attention.
    """
    return {
        "input_ids": ids,
        "position_ids": positions,
        # transformers passes a 4-D mask on unread and so does not build a mask itself.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),
        "past_key_values": cache,
        "use_cache": True,
        "fusion": plan,
    }
