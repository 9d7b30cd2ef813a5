"""Which models reuse can be right for, decided by what a model does rather than by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import get_layer_types_and_kwargs

from qcfuse_rag.errors import UnsupportedModel

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
WITHOUT_KEYS = "dummy"
"""What transformers calls a layer that keeps no keys and values: it uses those of another, or has no attention."""


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """How many tokens a prompt and its answer may have together, and why it is that many."""

    tokens: int
    reason: str


def refuse_unsupported(model: PreTrainedModel) -> ContextWindow:
    """Check what can be told from the configuration, before anything is run.

    Returns:
        The usable context window: the model's own, or less where its RoPE changes beyond some length.

    Raises:
        UnsupportedModel: naming the property that makes reuse wrong.
    """
    config = model.config.get_text_config()
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        raise UnsupportedModel("an adapter is attached, which the identity of stored caches would miss; merge it first")
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise UnsupportedModel("the model is spread over several devices; load it on one")
    if model.config.is_encoder_decoder:
        raise UnsupportedModel("encoder-decoder models have no chunk caches to reuse; use a decoder-only model")
    kinds = {kind for kind, _ in _layers(config)}
    if WITHOUT_KEYS in kinds:
        raise UnsupportedModel("some layers keep no keys and values of their own, so there is nothing of them to store")
    other = sorted(kinds - SUPPORTED_LAYERS)
    if other:
        raise UnsupportedModel(
            f"layers of type {', '.join(other)} keep a state that depends on everything before, so a chunk's part "
            "cannot be cut out and moved; only full and sliding attention can"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel("tokens attend to later tokens, so a chunk's keys depend on what follows it")
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{type(model).__name__} does not take attention functions from outside")
    if not isinstance(getattr(model.get_decoder(), "layers", None), nn.ModuleList):
        raise UnsupportedModel(f"{type(model).__name__} does not keep its layers in a list named `layers`")
    window = int(config.max_position_embeddings)
    if _rope_parameter(config, "llama_4_scaling_beta"):
        original = _rope_parameter(config, "original_max_position_embeddings")
        return ContextWindow(int(original or window), "beyond this length queries are scaled by where they stand")
    for kind in _rope_types(config):
        if kind == "dynamic":
            raise UnsupportedModel("dynamic RoPE changes its frequencies with the prompt's length; set another type")
        if kind == "longrope":
            beside = getattr(config, "original_max_position_embeddings", window)
            original = _rope_parameter(config, "original_max_position_embeddings") or beside
            return ContextWindow(int(original), "longrope changes its frequencies beyond this length")
    return ContextWindow(window, "the model's own limit")


def refuse_mismatched_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the model knows the tokens of the tokenizer's vocabulary.

    Those that were added to it may be more: many a model has one to pad with, which no prompt holds.

    Raises:
        UnsupportedModel: if it does not, so that some text would be read beyond the embeddings' end.
    """
    tokens = tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=False)
    known = model.get_input_embeddings().weight.shape[0]
    if tokens > known:
        raise UnsupportedModel(
            f"the tokenizer has {tokens:,} tokens and the model embeddings of {known:,}: they are not of one model"
        )


def stock_attention_name(model: PreTrainedModel) -> str:
    """Return the name of the attention of transformers' own that computes all that a model asks for.

    Torch's caps no scores, and transformers 5.17 takes it for Gemma 2 all the same.
    """
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "sdpa" if getattr(model, "_supports_sdpa", False) and not capped else "eager"


def sliding_windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """Return the sliding window in tokens that the configuration has for each layer, or None."""
    return tuple(
        int(settings["sliding_window"]) if kind == "sliding_attention" else None for kind, settings in _layers(config)
    )


def _layers(config: PreTrainedConfig) -> list[tuple[str, dict[str, Any]]]:
    """Return each layer's type, and what transformers would make its cache with."""
    kinds, settings = get_layer_types_and_kwargs(config)
    # Before transformers 5.19 one setting is for all; before 5.23 the last layers are left out if they keep nothing.
    each = settings if isinstance(settings, list) else [settings] * len(kinds)
    layers = list(zip(kinds, each, strict=True))
    return layers + [(WITHOUT_KEYS, {})] * (int(config.num_hidden_layers) - len(layers))


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """Return the RoPE types in use."""
    return {str(parameters.get("rope_type", "default")) for parameters in _rope_parameters(config)}


def _rope_parameter(config: PreTrainedConfig, name: str) -> float | None:
    """Return the smallest value of a RoPE parameter, or None if none is given."""
    return min((one[name] for one in _rope_parameters(config) if one.get(name)), default=None)


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return RoPE's settings; models with several layer types nest one dictionary per type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [one for one in parameters.values() if isinstance(one, dict)] or [parameters]
