"""Run a model over the rows of a plan."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from qcfuse_rag.fuse.buffer import KVBuffer
from qcfuse_rag.fuse.layerwise import SteeredPass, steered
from qcfuse_rag.fuse.rows import RowsPlan
from qcfuse_rag.model.language_model import LanguageModel


@torch.inference_mode()
def forward_rows(
    lm: LanguageModel, ids: Tensor, plan: RowsPlan, buffer: KVBuffer, course: SteeredPass | None = None
) -> Tensor:
    """Compute the plan's rows through all layers, writing their keys and values into the buffer.

    Args:
        lm: the model.
        ids: `[R]` int64 token ids of the rows.
        plan: the rows and what they see.
        buffer: must hold keys and values at every position a row sees that is not itself a row.
        course: changes the pass between layers, if given.

    Returns:
        `[vocabulary]` float32 logits after the last row.
    """
    model = lm.model
    if course is not None:
        decoder = model.get_decoder()
        model = _with_modules(model, _steered(decoder, course, lm.n_layers), instead=decoder)
    logits = model(**model_inputs(ids, plan, buffer), logits_to_keep=1).logits
    return logits[0, -1].float()  # type: ignore[no-any-return]


@torch.inference_mode()
def forward_logits(lm: LanguageModel, ids: Tensor, plan: RowsPlan, buffer: KVBuffer) -> Tensor:
    """Compute the plan's rows like `forward_rows`, and return what follows each: `[R, vocabulary]` float32 logits."""
    logits: Tensor = lm.model(**model_inputs(ids, plan, buffer), logits_to_keep=0).logits
    return logits[0].float()


@torch.inference_mode()
def forward_hidden(
    lm: LanguageModel, ids: Tensor, plan: RowsPlan, buffer: KVBuffer, *, depth: int, course: SteeredPass | None = None
) -> None:
    """Compute the plan's rows through the first `depth` layers only, for their keys, values and queries.

    Args:
        lm: the model.
        ids: `[R]` token ids of the rows, or `[B, R]` of the same rows of several sequences.
        plan: the rows and what they see.
        buffer: of as many sequences.
        depth: layers to run.
        course: changes the pass between layers, if given.
    """
    decoder = lm.model.get_decoder()
    if course is not None or depth < lm.n_layers:
        decoder = _steered(decoder, course, depth)
    decoder(**model_inputs(ids, plan, buffer))


def model_inputs(ids: Tensor, plan: RowsPlan, buffer: KVBuffer) -> dict[str, object]:
    """Return what a model is called with to compute the plan's rows over a buffer.

    Args:
        ids: `[R]` token ids of the rows, or `[B, R]` of the same rows of several sequences.
        plan: the rows and what they see.
        buffer: of as many sequences.
    """
    sequences = ids if ids.dim() == 2 else ids[None]
    return {
        "input_ids": sequences,
        "position_ids": plan.rows[None].expand(len(sequences), -1),
        # A 4-D mask is handed through unread, which keeps transformers from building one of its own.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),
        "past_key_values": buffer.cache(plan),
        "use_cache": True,
        "fusion": plan,
    }


def _steered(decoder: nn.Module, course: SteeredPass | None, depth: int) -> nn.Module:
    """Return the decoder with its first `depth` layers, steered if asked for; the original is not touched."""
    layers = decoder._modules["layers"]
    assert isinstance(layers, nn.ModuleList)
    first = layers[:depth]
    return _with_modules(decoder, first if course is None else steered(first, course), instead=layers)


def _with_modules(module: nn.Module, new: nn.Module, *, instead: nn.Module) -> nn.Module:
    """Return a view of a module that shares its weights and has one direct child replaced."""
    view = copy.copy(module)
    view._modules = {name: new if child is instead else child for name, child in module._modules.items()}
    return view
