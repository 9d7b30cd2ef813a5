"""Keep a model with float16 or int8 weights in a folder, and load it without its weights in the dtype.

transformers cannot save or load a model whose layers were replaced. Here all tensors go into one file, and the model is
built without memory around them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from qcfuse_rag.models.packed_linear import PackedLinear
from qcfuse_rag.models.weight_formats import HeldFormat, round_weights

TENSORS_FILE = "packed.safetensors"
"""Its metadata name the tensors that share the memory of another tensor, and that tensor."""
CHECKED_IDS = (1, 2, 3)
"""Token ids of the forward that a saved model is compared on."""


def save_packed(model: PreTrainedModel, folder: Path, weights: HeldFormat) -> None:
    """Save a model that `round_weights` has rounded to a format.

    Raises:
        OSError: if the model, loaded again, computes other logits.
    """
    tensors: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    owners: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in _tensors(model).items():
        owner = owners.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
        if owner == name:
            tensors[name] = tensor.detach().contiguous()
        else:
            shared[name] = owner
    save_file(tensors, folder / TENSORS_FILE, metadata=shared)
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    if not torch.equal(_logits(model), _logits(load_packed(folder, weights))):
        raise OSError(f"{type(model).__name__} computes other logits when it is loaded as it was saved")


def load_packed(folder: Path, weights: HeldFormat) -> PreTrainedModel:
    """Load a model that `save_packed` has saved in a format.

    Raises:
        ValueError: if the file does not hold the tensors of the model. A missing or damaged file raises other errors.
    """
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=config.dtype, attn_implementation="eager"
        )
        round_weights(model, weights)
    with safe_open(folder / TENSORS_FILE, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tensors |= {name: tensors[owner] for name, owner in (file.metadata() or {}).items()}
    expected = _tensors(model)
    if expected.keys() != tensors.keys():
        odd = min(expected.keys() ^ tensors.keys())
        raise ValueError(f"{TENSORS_FILE} has other tensors than the model, such as {odd}")
    packed = {name: tensors.pop(f"{name}.weight") for name, _ in _packed_linears(model)}
    for name, tensor in tensors.items():
        _replace(model, name, tensor)
    for name, module in _packed_linears(model):
        module.pack(packed[name])
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name, also buffers that are not part of the state, such as rotary tables."""
    tensors = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    return tensors | {f"{name}.weight": module.weight for name, module in _packed_linears(model)}


def _packed_linears(model: nn.Module) -> list[tuple[str, PackedLinear]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, PackedLinear)]


def _replace(model: nn.Module, name: str, tensor: Tensor) -> None:
    parent, _, child = name.rpartition(".")
    module = model.get_submodule(parent)
    if child in module._parameters:
        module._parameters[child] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[child] = tensor


@torch.inference_mode()
def _logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=torch.tensor([CHECKED_IDS])).logits  # type: ignore[no-any-return]
