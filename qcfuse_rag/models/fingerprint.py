"""Identity of a model: everything that stored keys and values depend on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from qcfuse_rag.models.rope import LayerRope

if TYPE_CHECKING:  # a store knows models by their fingerprints, and is opened where there is none
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Fields of a configuration that say where a model came from or how it is run, not what it computes.
NOT_IDENTITY = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}


@dataclass(frozen=True)
class Fingerprint:
    """Named hashes of what a model's keys and values depend on.

    Attributes:
        weights: hash of the name, shape and bytes of every parameter and every buffer that is saved with the model.
        config: hash of the configuration, less the fields that do not change results.
        tokenizer: hash of the tokenizer's rules and vocabulary.
        rope: hash of the measured rotation of each layer.
        dtype: dtype keys and values are computed and stored in, such as `bfloat16`.
    """

    weights: str
    config: str
    tokenizer: str
    rope: str
    dtype: str

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits over all fields."""
        return digest(json.dumps(self.fields(), sort_keys=True).encode())

    def fields(self) -> dict[str, str]:
        """Return the fields by name, ready for JSON."""
        return {name: getattr(self, name) for name in ("weights", "config", "tokenizer", "rope", "dtype")}

    def differences(self, other: dict[str, str]) -> list[str]:
        """Name the fields in which a stored fingerprint differs from this one."""
        return [name for name, value in self.fields().items() if other.get(name) != value]


def digest(data: bytes) -> str:
    """Return 32 hexadecimal digits of BLAKE2b; collisions, even wanted ones, are out of reach."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def fingerprint_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ropes: tuple[LayerRope, ...]
) -> Fingerprint:
    """Hash a loaded model. Reads every weight once: about 0.1 s per GB of memory.

    Taken from the weights in memory, not from file names, so that a fine-tune under an old name, a merged adapter or
    another quantisation is another model.
    """
    return Fingerprint(
        weights=_hash_weights(model),
        config=digest(_config_json(model.config.get_text_config().to_dict())),
        tokenizer=digest(tokenizer.backend_tokenizer.to_str().encode()),
        rope=_hash_ropes(ropes),
        dtype=str(model.dtype).removeprefix("torch."),
    )


def _hash_weights(model: PreTrainedModel) -> str:
    # xxHash, an order of magnitude faster than a cryptographic hash: the weights are the user's own.
    state = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return state.hexdigest()


def _config_json(config: dict[str, Any]) -> bytes:
    kept = {k: v for k, v in config.items() if k not in NOT_IDENTITY and not k.startswith("_attn")}
    quantization = kept.get("quantization_config")
    if isinstance(quantization, dict):
        kept["quantization_config"] = {k: v for k, v in quantization.items() if k != "gguf_file"}
    return json.dumps(kept, sort_keys=True, default=str).encode()


def _hash_ropes(ropes: tuple[LayerRope, ...]) -> str:
    parts = []
    for rope in ropes:
        table = b"none" if rope.inv_freq is None else rope.inv_freq.cpu().numpy().tobytes()
        parts.append(digest(table + bytes([rope.interleaved])))
    return digest("".join(parts).encode())
