"""Keep a model with int8 weights in a folder, and load it without its weights in the dtype.

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

from qcfuse_rag.models.int8_linear import quantize_linears

TENSORS_FILE = "int8.safetensors"
"""Its metadata name the tensors that share the memory of another tensor, and that tensor."""
CHECKED_IDS = (1, 2, 3)
"""Token ids of the forward that a saved model is compared on."""


def save_int8(model: PreTrainedModel, folder: Path) -> None:
    """Save a model that `quantize_linears` has rounded.

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
    if not torch.equal(_logits(model), _logits(load_int8(folder))):
        raise OSError(f"{type(model).__name__} computes other logits when it is loaded as it was saved")


def load_int8(folder: Path) -> PreTrainedModel:
    """Load a model that `save_int8` has saved.

    Raises:
        ValueError: if the file does not hold the tensors of the model. A missing or damaged file raises other errors.
    """
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=config.dtype, attn_implementation="eager"
        )
        quantize_linears(model)
    with safe_open(folder / TENSORS_FILE, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tensors |= {name: tensors[owner] for name, owner in (file.metadata() or {}).items()}
    expected = _tensors(model)
    if expected.keys() != tensors.keys():
        raise ValueError(f"{TENSORS_FILE} has other tensors than the model, such as {min(expected ^ tensors.keys())}")
    for name, tensor in tensors.items():
        _replace(model, name, tensor)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name, also buffers that are not part of the state, such as rotary tables."""
    return dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))


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
