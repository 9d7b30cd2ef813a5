"""Run a model over the rows of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache

from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.layer_hooks import HookedPass
from qcfuse_rag.runtime.model_views import decoder_view, model_view
from qcfuse_rag.runtime.rows import RowsPlan

if TYPE_CHECKING:
    from qcfuse_rag.runtime.language_model import LanguageModel
    from qcfuse_rag.runtime.step_plan import StepPlan
    from qcfuse_rag.runtime.table_plan import TablePlan


@torch.inference_mode()
def forward_rows(
    lm: LanguageModel, ids: Tensor, plan: RowsPlan, buffer: KVBuffer, hooked_pass: HookedPass | None = None
) -> Tensor:
    """Compute the plan's rows through all layers, writing their keys and values into the buffer.

    Args:
        lm: the model.
        ids: `[R]` int64 token ids of the rows.
        plan: the rows and what they see.
        buffer: must hold keys and values at every position a row sees that is not itself a row.
        hooked_pass: changes the pass between layers, if given.

    Returns:
        `[vocabulary]` float32 logits after the last row.
    """
    model = lm.model if hooked_pass is None else model_view(lm.model, lm.model.get_decoder(), lm.n_layers, hooked_pass)
    logits = model(**model_inputs(ids, plan, buffer), logits_to_keep=1).logits
    return logits[0, -1].float()  # type: ignore[no-any-return]


@torch.inference_mode()
def forward_logits(lm: LanguageModel, ids: Tensor, plan: RowsPlan, buffer: KVBuffer) -> Tensor:
    """Compute the plan's rows like `forward_rows`, and return what follows each: `[R, vocabulary]` float32 logits."""
    logits: Tensor = lm.model(**model_inputs(ids, plan, buffer), logits_to_keep=0).logits
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
    """Compute the plan's rows through the first `depth` layers only, for their keys, values and queries.

    Args:
        lm: the model.
        ids: `[R]` token ids of the rows, or `[B, R]` of the same rows of several sequences.
        plan: the rows and what they see.
        buffer: of as many sequences.
        depth: layers to run.
        hooked_pass: changes the pass between layers, if given.
    """
    decoder = lm.model.get_decoder()
    if hooked_pass is not None or depth < lm.n_layers:
        decoder = decoder_view(decoder, depth, hooked_pass)
    decoder(**model_inputs(ids, plan, buffer))


def model_inputs(ids: Tensor, plan: RowsPlan, buffer: KVBuffer) -> dict[str, Any]:
    """Return what a model is called with to compute the plan's rows over a buffer.

    Args:
        ids: `[R]` token ids of the rows, or `[B, R]` of the same rows of several sequences.
        plan: the rows and what they see.
        buffer: of as many sequences.
    """
    sequences = ids if ids.dim() == 2 else ids[None]
    return planned_inputs(sequences, plan.rows[None].expand(len(sequences), -1), buffer.cache(plan), plan)


def planned_inputs(
    ids: Tensor, positions: Tensor, cache: Cache, plan: RowsPlan | StepPlan | TablePlan
) -> dict[str, Any]:
    """Return what a model is called with to compute the rows of a plan.

    Args:
        ids: `[B, R]` int64 token ids of the rows.
        positions: `[B, R]` int64, where they stand.
        cache: through which their keys and values are written.
        plan: what they see.
    """
    return {
        "input_ids": ids,
        "position_ids": positions,
        # A 4-D mask is handed through unread, which keeps transformers from building one of its own.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),
        "past_key_values": cache,
        "use_cache": True,
        "fusion": plan,
    }
