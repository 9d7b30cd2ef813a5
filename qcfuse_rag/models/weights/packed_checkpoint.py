"""Keep a model with float16 or int8 weights in a folder, and load it without its weights in the dtype.

transformers cannot save or load a model whose layers were replaced. Here the weights of each packed layer are in files
of their own, so that no more than one part of a layer is in memory twice; all other tensors are in one file, which
stays mapped. The model is built without memory around them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from qcfuse_rag.models.weights.formats import HeldFormat, round_weights
from qcfuse_rag.models.weights.packed_linear import PackedLinear

TENSORS_FILE = "packed.safetensors"
"""Its metadata name the tensors that share the memory of another tensor, and that tensor."""
LINEAR_FILE = "linear-{:05}-{:03}.safetensors"
"""Name of the file with a part of a packed layer's weights, by the numbers of the layer and of the part."""
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
        for part, weight in enumerate(module.parts()):
            save_file({name: weight}, folder / LINEAR_FILE.format(number, part))
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
        count = ceil(module.out_features / module.part_rows)
        files = [folder / LINEAR_FILE.format(number, part) for part in range(count)]
        if name in originals and all(map(torch.equal, _parts(files, name, module), originals[name].parts())):
            module.share(originals[name])
        else:
            module.pack_parts(_parts(files, name, module))
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _parts(files: list[Path], name: str, module: PackedLinear) -> Iterator[Tensor]:
    """Yield the weights of a packed layer, read from files part by part."""
    left = module.out_features
    for file in files:
        weight = load_file(file)[name]
        if weight.shape != (min(left, module.part_rows), module.in_features) or weight.dtype != module.stored_dtype:
            raise ValueError(f"{file.name} has other weights than {name}")
        left -= len(weight)
        yield weight


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
