"""Check whether cache reuse is correct for a model, by the model's properties rather than its name.

A configuration may have a sliding window that the model's class never reads. So it is measured: a model that uses its
window gives different hidden states with another window.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import get_layer_types_and_kwargs

from qcfuse_rag.errors import UnsupportedModel
from qcfuse_rag.models.rope import decoder_of

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
RECURRENT_LAYERS = {"linear_attention", "conv"}
"""Transformers' types of layers whose state is that of `models.recurrence`, whatever computes it."""
FEED_FORWARD_LAYERS = {"moe", "mlp"}
"""Transformers' types of layers that are a feed-forward network alone."""
SCALED_QUERIES = "beyond this length queries are scaled by their position"
WITHOUT_KEYS = "dummy"
"""Transformers' type of a layer without keys and values: it uses another layer's, or is a feed-forward network."""


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """The largest number of tokens of a prompt and its answer together, and the reason for that number."""

    tokens: int
    reason: str


def refuse_unsupported(model: PreTrainedModel) -> ContextWindow:
    """Check a model by its configuration; return its context window up to where its RoPE changes.

    Raises:
        UnsupportedModel: if reuse would be wrong; the message names the property.
    """
    config = model.config.get_text_config()
    sharding = _sharding(model)
    if sharding is not None:
        raise UnsupportedModel(
            f"the model is spread over several devices by {sharding}; load it whole on one device, such as "
            "device='cuda:0', and run one engine for each device"
        )
    if model.config.is_encoder_decoder:
        raise UnsupportedModel("encoder-decoder models have no chunk caches to reuse; use a decoder-only model")
    kinds = [kind for kind, _ in _layers(config)]
    own = [kind for kind in kinds if kind != WITHOUT_KEYS]
    if kinds[: len(own)] != own or not set((getattr(config, "layer_types", None) or own)[len(own) :]) <= set(own):
        raise UnsupportedModel(
            "some layers keep no keys and values of their own and do not read those of an earlier layer of their kind"
        )
    other = sorted(set(own) - ATTENTION_LAYERS - RECURRENT_LAYERS - FEED_FORWARD_LAYERS)
    if other:
        raise UnsupportedModel(
            f"layers of type {', '.join(other)} keep a state of which a chunk's part cannot be cut out and moved; "
            "full, sliding, chunked and linear attention and short convolutions are supported"
        )
    if not set(own) & ATTENTION_LAYERS:
        raise UnsupportedModel("no layer has attention, by which tokens to recompute are chosen")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel("tokens attend to later tokens, so a chunk's keys depend on what follows it")
    if not getattr(model, "_supports_attention_backend", False) and not set(own) & RECURRENT_LAYERS:
        raise UnsupportedModel(f"{type(model).__name__} does not accept attention functions from outside")
    layers = getattr(decoder_of(model), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedModel(f"{type(model).__name__} does not keep its layers in a list named `layers`")
    if len(layers) != len(kinds):
        raise UnsupportedModel(
            f"{type(model).__name__} has {len(layers)} layers with {len(kinds)} attentions; passes act between layers, "
            "each of which must have one"
        )
    return min(_limits(config, own), key=lambda window: window.tokens)


@contextmanager
def refusing_errors(model: PreTrainedModel) -> Iterator[None]:
    """Turn an error of a model's own code into a refusal; a lack of memory stays one."""
    try:
        yield
    except (UnsupportedModel, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{type(model).__name__} fails as it is measured: {type(error).__name__}: {error}"
        ) from error


def _limits(config: PreTrainedConfig, kinds: list[str]) -> Iterator[ContextWindow]:
    limit = int(config.max_position_embeddings)
    yield ContextWindow(limit, "the model's own limit")
    if "chunked_attention" in kinds:
        yield ContextWindow(int(config.attention_chunk_size), "beyond this length layers see only the last chunk of it")
    if getattr(config, "attn_temperature_tuning", False):
        yield ContextWindow(int(config.floor_scale) - 1, SCALED_QUERIES)
    if _rope_parameter(config, "llama_4_scaling_beta"):
        original = _rope_parameter(config, "original_max_position_embeddings")
        yield ContextWindow(int(original or limit), SCALED_QUERIES)
    for kind in {str(parameters.get("rope_type")) for parameters in _rope_parameters(config)}:
        if kind == "dynamic":
            raise UnsupportedModel("dynamic RoPE changes its frequencies with the prompt's length; set another type")
        if kind == "longrope":
            outside = getattr(config, "original_max_position_embeddings", limit)
            original = _rope_parameter(config, "original_max_position_embeddings") or outside
            yield ContextWindow(int(original), "longrope changes its frequencies beyond this length")


def _sharding(model: PreTrainedModel) -> str | None:
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return "its device_map"
    wrappers = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    if wrappers & {"FSDPModule", "FullyShardedDataParallel"}:
        return "FSDP"
    for weight in model.parameters():
        if hasattr(weight, "ds_id"):
            return "DeepSpeed"
        if hasattr(weight, "device_mesh"):
            return "tensor parallelism (tp_plan)"
    return None


def refuse_mismatched_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the model has an embedding for each token of the tokenizer's vocabulary.

    Added tokens may exceed the embeddings: many models add a padding token, which no prompt contains.
    """
    tokens = tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=False)
    embeddings = model.get_input_embeddings().weight.shape[0]
    if tokens > embeddings:
        raise UnsupportedModel(
            f"the tokenizer has {tokens:,} tokens and the model {embeddings:,} embeddings: "
            "they belong to different models"
        )


def stock_attention_name(model: PreTrainedModel) -> str:
    """Return the name of the transformers attention that computes everything a model needs.

    `sdpa` cannot cap scores, but transformers 5.17 offers it for Gemma 2, which caps them.
    """
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "sdpa" if getattr(model, "_supports_sdpa", False) and not capped else "eager"


def sliding_windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """Return the sliding window in tokens of each layer with keys of its own; None for full attention."""
    return tuple(
        int(settings["sliding_window"]) if kind == "sliding_attention" else None
        for kind, settings in _layers(config)
        if kind != WITHOUT_KEYS
    )


def layers_of(config: PreTrainedConfig, kinds: Set[str]) -> list[int]:
    """Return the layers of some types."""
    return [index for index, (kind, _) in enumerate(_layers(config)) if kind in kinds]


def shared_layer(config: PreTrainedConfig, layer: int, own: int) -> int:
    """Return the layer whose keys and values another one reads: the last of its kind among the first `own` layers."""
    kinds = config.layer_types
    return max(index for index in range(own) if kinds[index] == kinds[layer])


def _layers(config: PreTrainedConfig) -> list[tuple[str, dict[str, Any]]]:
    kinds, settings = get_layer_types_and_kwargs(config)
    # Before transformers 5.19 all layers share one setting; before 5.23 the list lacks last layers that keep nothing.
    settings_per_layer = settings if isinstance(settings, list) else [settings] * len(kinds)
    own = getattr(config, "layer_types", None) or kinds
    kinds = [name if name in FEED_FORWARD_LAYERS else kind for name, kind in zip(own, kinds, strict=False)]
    layers = list(zip(kinds, settings_per_layer, strict=True))
    return layers + [(WITHOUT_KEYS, {})] * (int(config.num_hidden_layers) - len(layers))


def _rope_parameter(config: PreTrainedConfig, name: str) -> float | None:
    return min((parameters[name] for parameters in _rope_parameters(config) if parameters.get(name)), default=None)


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    # Models with several layer types nest one dictionary per type.
    return [nested for nested in parameters.values() if isinstance(nested, dict)] or [parameters]


PROBE_TOKENS, PROBE_WINDOW = 24, 4


@torch.inference_mode()
def measure_windows(model: PreTrainedModel) -> tuple[int | None, ...]:
    """Return each layer's sliding window in tokens; None for full attention.

    If the configuration has a window, some tokens are run three times, the third time with a narrow window. This uses
    the attention `eager`, which applies windows by the mask alone.

    Raises:
        UnsupportedModel: if nothing changes although the model's layers have a window.
    """
    config = model.config.get_text_config()
    windows = sliding_windows(config)
    if not any(windows):
        return windows
    embeddings = model.get_input_embeddings()
    n_tokens = min(PROBE_TOKENS, int(config.max_position_embeddings))
    ids = (7 + 31 * torch.arange(n_tokens, device=embeddings.weight.device)) % embeddings.num_embeddings

    def hidden() -> Tensor:
        state: Tensor = decoder_of(model)(input_ids=ids[None], use_cache=False).last_hidden_state
        return state.float()

    window, attention = config.sliding_window, config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        first, again = hidden(), hidden()
        config.sliding_window = PROBE_WINDOW if window != PROBE_WINDOW else 1
        narrow = hidden()
    finally:
        config.sliding_window = window
        model.set_attn_implementation(attention)
    noise = (again - first).abs().max()
    if (narrow - first).abs().max() > 2 * noise:
        return windows
    if any(getattr(module, "sliding_window", None) for module in decoder_of(model).modules()):
        raise UnsupportedModel(
            f"whether {type(model).__name__} attends in a window of {window:,} tokens cannot be told: its layers have "
            "one, but another window in the configuration changes nothing"
        )
    return (None,) * len(windows)
