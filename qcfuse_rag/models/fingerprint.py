"""The fingerprint of a model: hashes of everything that stored keys and values depend on."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from qcfuse_rag.errors import UnsupportedModel
from qcfuse_rag.models.recurrence import RecurrentLayer
from qcfuse_rag.models.rope import LayerRope

if TYPE_CHECKING:  # a store imports fingerprints and is opened without a model; transformers imports slowly
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Fields that say where a model came from, how it runs, was trained or ends answers, or that weights or rotations show.
NOT_IDENTITY = re.compile(
    r"_.*|model_type|transformers_version|gguf_file|(torch_)?dtype|architectures|use_cache|return_dict"
    r"|.*_token_id|.*dropout.*|.*_pdrop|initializer_range|router_aux_loss_coef|problem_type|id2label|label2id"
    r"|output_(attentions|hidden_states|router_logits)|tie_word_embeddings|mlp_layer_types|first_k_dense_replace"
    r"|partial_rotary_factor"
)
# Fields that count at the class's default too: where a later version has another one, it computes something else.
ALWAYS = {"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "hidden_act"}
ALWAYS |= {"hidden_activation", "sliding_window", "attn_logit_softcapping", "num_experts_per_tok"}
ALWAYS |= {"quantization_config"}  # no class declares it


@dataclass(frozen=True)
class Fingerprint:
    """Hashes of everything that a model's keys and values depend on."""

    weights: str  # name, shape and bytes of every parameter and every saved buffer
    config: str  # without the fields that do not change results
    tokenizer: str  # rules and vocabulary
    rope: str  # the measured rotation of each layer
    dtype: str  # of computed keys and values, such as `bfloat16`, as it is
    weight_format: str = "model"  # or what the weights were quantised to as they were loaded

    @cached_property
    def digest(self) -> str:
        """Hash of all fields, 32 hexadecimal digits."""
        return digest(json.dumps(self.fields(), sort_keys=True).encode())

    def fields(self) -> dict[str, str]:
        """Return the fields by name, ready for JSON; the weight format `model` is left out."""
        rounded = () if self.weight_format == "model" else ("weight_format",)
        return {name: getattr(self, name) for name in ("weights", "config", "tokenizer", "rope", "dtype", *rounded)}

    @property
    def number_formats(self) -> str:
        """The dtype, and the weights' format if it is another: such as `float32` or `float32, int8 weights`."""
        return self.dtype if self.weight_format == "model" else f"{self.dtype}, {self.weight_format} weights"

    def differences(self, other: dict[str, str]) -> list[str]:
        """Return the names of the fields in which a stored fingerprint differs."""
        mine = self.fields()
        return [name for name in {**mine, **other} if other.get(name) != mine.get(name)]


def digest(data: bytes) -> str:
    """Return the BLAKE2b hash of bytes, 32 hexadecimal digits; collisions cannot be constructed."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def hash_weights(model: PreTrainedModel) -> str:
    """Hash the weights of a loaded model, in about 0.1 s per GB; raise `UnsupportedModel` if they cannot be read."""
    # xxHash is ten times as fast as a cryptographic hash, and the user's own weights need no protection.
    state = xxhash.xxh3_128()
    weights = (part for name, tensor in sorted(model.state_dict().items()) for part in plain_parts(name, tensor))
    for name, tensor in weights:
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        try:
            state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{name} is a {type(tensor).__name__}, whose numbers cannot be read to tell the model from others"
            ) from error
    return state.hexdigest()


def hash_config(config: PreTrainedConfig) -> str:
    """Hash what a text model's configuration sets, in about 20 ms.

    Defaults, what the class derives from other fields, and fields that it does not know do not count: so those that a
    later version adds do not.
    """

    def made(fields: dict[str, Any]) -> dict[str, Any]:
        try:
            return _identity(type(config)(**copy.deepcopy(fields)).to_dict())
        except Exception:  # of any class: it cannot be made without what was left out
            return {}

    logger = logging.getLogger("transformers")  # it would warn of what is only tried
    level = logger.level
    logger.setLevel(logging.ERROR)
    full, default = _identity(config.to_dict()), made({})
    known = {name: full[name] for name in default or full if name in full}
    fields = {name: value for name, value in known.items() if default.get(name) != value}
    if not made(fields).items() >= known.items():  # such as a default where another value would be derived
        fields = known
    for *outer, name in _paths(fields):
        rest = copy.deepcopy(fields)
        reduce(lambda part, key: part.get(key, {}), outer, rest).pop(name, None)
        if made(rest).items() >= known.items():
            fields = rest
    logger.setLevel(level)
    fields |= {name: full[name] for name in ALWAYS & full.keys() if full[name] is not None}
    return digest(json.dumps({**fields, "model_type": config.model_type}, sort_keys=True, default=str).encode())


def fingerprint_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ropes: tuple[LayerRope, ...],
    weights_hash: str | None = None,
    weight_format: str = "model",
    recurrent: Collection[RecurrentLayer] = (),
) -> Fingerprint:
    """Hash a loaded model.

    The weights in memory count, not the file names: a fine-tune under an old name, a merged adapter or another
    quantisation is another model. `weights_hash` saves hashing them; with a `weight_format` it is that of the weights
    before they were quantised.
    """
    return Fingerprint(
        weights=weights_hash or hash_weights(model),
        config=hash_config(model.config.get_text_config()),
        tokenizer=digest(tokenizer.backend_tokenizer.to_str().encode()),
        rope=_hash_layout(ropes, recurrent),
        dtype=str(model.dtype).removeprefix("torch."),
        weight_format=weight_format,
    )


def plain_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor; for a tensor subclass such as torchao's, yield the tensors it is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    parts, _ = tensor.__tensor_flatten__()
    for part in parts:
        yield from plain_parts(f"{name}.{part}", getattr(tensor, part))


def _identity(fields: dict[str, Any]) -> dict[str, Any]:
    counted = {name: value for name, value in fields.items() if not NOT_IDENTITY.fullmatch(str(name))}
    return {name: _identity(value) if isinstance(value, dict) else value for name, value in counted.items()}


def _paths(fields: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the keys that lead to every field, those of a field before those in it."""
    for name in sorted(fields):
        yield (name,)
        inner = fields[name] if isinstance(fields[name], dict) else {}
        yield from ((name, *path) for path in _paths(inner))


def _hash_layout(ropes: tuple[LayerRope, ...], recurrent: Collection[RecurrentLayer]) -> str:
    tables = (b"none" if rope.inv_freq is None else rope.inv_freq.cpu().numpy().tobytes() for rope in ropes)
    parts = (digest(table + bytes([rope.interleaved])) for table, rope in zip(tables, ropes, strict=True))
    stored = (digest(used.numpy().tobytes()) for layer in recurrent for used in layer.used)
    return digest("".join((*parts, *stored)).encode())
