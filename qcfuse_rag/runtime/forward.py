"""Run a model over the rows of a plan, and over the next rows of several requests together.

A decode step reads the model's weights once, however many requests it has; reading them is most of the time of a step.
The requests may differ in length and keep their own buffers: nothing is copied or padded when one joins or leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache

from qcfuse_rag.models.rope import cache_argument, decoder_of
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.device import to_device
from qcfuse_rag.runtime.kernels.support import kernels_available
from qcfuse_rag.runtime.kv_table import KVTable
from qcfuse_rag.runtime.layer_hooks import HookedPass
from qcfuse_rag.runtime.model_views import decoder_view, model_view
from qcfuse_rag.runtime.rows import RowsPlan, StepPlan
from qcfuse_rag.runtime.table_plan import TablePlan

if TYPE_CHECKING:
    from qcfuse_rag.runtime.language_model import LanguageModel


@torch.inference_mode()
def forward_rows(
    lm: LanguageModel, ids: Tensor, plan: RowsPlan, buffer: KVBuffer, hooked_pass: HookedPass | None = None
) -> Tensor:
    """Compute the plan's `[R]` int64 ids through all layers; return `[vocabulary]` float32 logits after the last row.

    The buffer must hold keys and values at every position that a row sees and that is not itself a row. Those of
    the rows are written to it. `hooked_pass` acts between layers.
    """
    model: nn.Module = lm.fused_model
    if hooked_pass is not None:
        model = model_view(model, decoder_of(lm.fused_model), hooked_pass)
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

    Layers that read another layer's keys are never among them.

    The ids are `[R]`, or `[B, R]` of the same rows of B sequences, as many as the buffer has.
    """
    decoder = decoder_of(lm.fused_model)
    if hooked_pass is not None or depth < lm.n_layers or lm.n_sharing:
        decoder = decoder_view(decoder, depth, hooked_pass)
    decoder(**model_inputs(ids, plan, buffer))


def model_inputs(ids: Tensor, plan: RowsPlan, buffer: KVBuffer) -> dict[str, Any]:
    """Return the keyword arguments of a model call that computes a plan's `[R]` or `[B, R]` ids over a buffer."""
    sequences = ids if ids.dim() == 2 else ids[None]
    return planned_inputs(sequences, plan.rows[None].expand(len(sequences), -1), buffer.cache(plan), plan)


def planned_inputs(
    ids: Tensor, positions: Tensor, cache: Cache, plan: RowsPlan | StepPlan | TablePlan
) -> dict[str, Any]:
    """Return the keyword arguments of a model call that computes `[B, R]` int64 ids at `[B, R]` int64 positions."""
    return {
        "input_ids": ids,
        "position_ids": positions,
        # transformers passes a 4-D mask on unread and so does not build a mask itself.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),
        cache_argument(): cache,
        "use_cache": True,
        "fusion": plan,
    }


@torch.inference_mode()
def forward_step(
    lm: LanguageModel, tokens: Sequence[int], positions: Sequence[int], buffers: Sequence[KVBuffer]
) -> Tensor:
    """Compute the next row of each request, its last token at its position; return `[B, vocabulary]` float32 logits.

    The keys and values of the tokens are written to the requests' buffers.
    """
    rows = to_device(torch.tensor(positions), lm.device)[:, None]
    plan: StepPlan | TablePlan = StepPlan(buffers, rows, tuple(positions), lm.sliding)
    if lm.needs_torch_steps is None and kernels_available(lm.device, lm.dtype, lm.widest_head):
        plan = TablePlan(rows, KVTable.of(buffers, lm.shapes, max(positions) + 1), lm.sliding)
    return forward_plan(lm.fused_model, to_device(torch.tensor(tokens), lm.device), plan)


@torch.inference_mode()
def forward_plan(model: nn.Module, tokens: Tensor, plan: StepPlan | TablePlan) -> Tensor:
    """Compute a planned step of `[B]` int64 tokens on the model's device; return `[B, vocabulary]` float32 logits."""
    logits: Tensor = model(**planned_inputs(tokens[:, None], plan.rows, plan.cache(), plan)).logits
    return logits[:, -1].float()
