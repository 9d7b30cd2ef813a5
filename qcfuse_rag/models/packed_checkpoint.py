"""Keep a model with float16 or int8 weights in a folder, and load it without its weights in the dtype.

transformers cannot save or load a model whose layers were replaced. Here the weights of each packed layer are a file of
their own, so that no more than those of one layer are in memory twice; all other tensors are in one file, which stays
mapped. The model is built without memory around them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from qcfuse_rag.models.packed_linear import PackedLinear
from qcfuse_rag.models.weight_formats import HeldFormat, round_weights

TENSORS_FILE = "packed.safetensors"
"""Its metadata name the tensors that share the memory of another tensor, and that tensor."""
LINEAR_FILE = "linear-{:05}.safetensors"
"""Name of the file with the weights of a packed layer, by its number among the model's modules."""
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
    for number, (name, module) in enumerate(_packed_linears(model)):
        save_file({name: module.weight}, folder / LINEAR_FILE.format(number))
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    if not torch.equal(_logits(model), _logits(load_packed(folder, weights, like=model))):
        raise OSError(f"{type(model).__name__} computes other logits when it is loaded as it was saved")


def packed_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of a model's tensors, packed or not."""
    linears = (module for _, module in _packed_linears(model))
    plain = {tensor.data_ptr(): tensor.nbytes for tensor in _tensors(model).values()}
    return sum(plain.values()) + sum(
        module.out_features * module.in_features * module.stored_dtype.itemsize for module in linears
    )


def load_packed(folder: Path, weights: HeldFormat, *, like: PreTrainedModel | None = None) -> PreTrainedModel:
    """Load a model that `save_packed` has saved in a format.

    Args:
        folder: where it was saved.
        weights: its format.
        like: the model that was saved. Its packed weights are compared with the folder's, and used instead of those.

    Raises:
        ValueError: if the files do not hold the tensors of the model. A missing or damaged file raises other errors.
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
    for name, tensor in tensors.items():
        _replace(model, name, tensor)
    originals = {} if like is None else dict(_packed_linears(like))
    for number, (name, module) in enumerate(_packed_linears(model)):
        weight = load_file(folder / LINEAR_FILE.format(number))[name]
        if name in originals and torch.equal(weight, originals[name].weight):
            module.share(originals[name])
        elif weight.shape == module.weight.shape and weight.dtype == module.stored_dtype:
            module.pack(weight)
        else:
            raise ValueError(f"{name} has other weights than the model")
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name, also buffers that are not part of the state, such as rotary tables.

    Packed weights are neither.
    """
    return dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))


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
