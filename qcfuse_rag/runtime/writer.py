"""The writer: a low-rank adapter that is on only while primed passages are computed for the store.

Passages are computed apart, but read together; a writer brings their keys and values nearer to those of full prefill.
Whatever reads them runs the model as it is, so requests cost the same, and full prefill is unchanged. The idea is
SemPIC's (arXiv 2607.28069). `tuning` makes writers, and a store's folder keeps them: one for each model. A writer makes
passages of other kinds worse, so it computes those alone that it was tuned on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.models.fingerprint import digest
from qcfuse_rag.models.rope import decoder_of
from qcfuse_rag.runtime.model_views import view_of

WriterWeights = Mapping[str, tuple[Tensor, Tensor]]
"""By the name of a linear layer within the decoder: `[rank, in]` and `[out, rank]`."""
SCALE = 2.0
SIDES = ("down", "up")
PASSAGES = "passages"
"""Name of the tensor with the passages' hashes, `[n, 16]` uint8."""


class AdaptedLinear(nn.Module):
    """A linear layer to whose output the product with two low-rank matrices is added (LoRA, arXiv 2106.09685)."""

    def __init__(self, inner: nn.Module, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.inner, self._pair = inner, (down, up)

    def forward(self, given: Tensor) -> Tensor:
        """Return `[..., out]` for `[..., in]`."""
        output: Tensor = self.inner(given)
        down, up = self._pair
        return output + SCALE * F.linear(F.linear(given, down), up)


def linear_layers(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return the decoder's linear layers, and the numbers of their inputs and outputs."""
    modules = decoder_of(model).named_modules()
    return {name: (each.in_features, each.out_features) for name, each in modules if isinstance(each, nn.Linear)}


def adapted_view(model: PreTrainedModel, weights: WriterWeights) -> PreTrainedModel:
    """Return a view of a model that shares its weights and adds those of a writer, to which gradients flow."""
    decoder = decoder_of(model)

    def view(module: nn.Module, name: str | None) -> nn.Module:
        if name is not None and name in weights:
            return AdaptedLinear(module, *weights[name])
        parts = dict[str, nn.Module | None]()
        for part, child in module._modules.items():
            inner = "" if child is decoder else None if name is None else f"{name}.{part}".lstrip(".")
            parts[part] = child and view(child, inner)
        return view_of(module, parts)

    whole = view(model, "" if model is decoder else None)
    assert isinstance(whole, PreTrainedModel)
    return whole


def save_writer(path: Path, weights: WriterWeights, passages: Collection[str], metadata: Mapping[str, str]) -> None:
    """Write a writer in bfloat16, with its passages' hashes; raise `OSError` if that fails, and the old file stays."""
    halves = {f"{name}.{side}": half for name, pair in weights.items() for side, half in zip(SIDES, pair, strict=True)}
    tensors = {name: half.detach().bfloat16().contiguous() for name, half in halves.items()}
    hashes = torch.frombuffer(bytearray.fromhex("".join(sorted(passages))), dtype=torch.uint8)
    write_atomically(path, save({**tensors, PASSAGES: hashes.view(len(passages), -1)}, dict(metadata)))


def load_writer(path: Path, model: PreTrainedModel) -> tuple[WriterWeights, frozenset[str], str]:
    """Return the writer in a file, with device and dtype of its model, the hashes of its passages, and its own hash.

    Raises:
        QCFuseError: if it cannot be read, or belongs to another model.
    """
    try:
        data = path.read_bytes()
        tensors = load(data)
        passages = frozenset(row.numpy().tobytes().hex() for row in tensors.pop(PASSAGES))
        halves = {name: half.to(model.device, model.dtype) for name, half in tensors.items()}
        weights = {
            name: (halves[f"{name}.down"], halves[f"{name}.up"])
            for name in dict.fromkeys(half.rpartition(".")[0] for half in halves)
        }
    except (OSError, SafetensorError, KeyError) as error:
        raise QCFuseError(
            f"the writer {path} cannot be read ({error}): delete it, or run `qcfuse tune` again"
        ) from error
    sizes = linear_layers(model)
    if any(sizes.get(name) != (down.shape[1], up.shape[0]) for name, (down, up) in weights.items()):
        raise QCFuseError(f"the writer {path} belongs to another model: delete it, or run `qcfuse tune` again")
    return weights, passages, digest(data)
