"""Tiny random models of many families: real transformers classes, weights drawn on the spot, no files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 320
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Wide enough that attention is far from even, so that a wrong position or mask shows.
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2

SHARING = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention", "sliding_attention", "full_attention"]
"""Of these layers, the last three read the keys and values of layers 2 and 3."""
PER_LAYER = {
    "num_hidden_layers": 7,
    "num_kv_shared_layers": 3,
    "layer_types": SHARING,
    "sliding_window": 24,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}

LINEAR_AND_FULL = ["linear_attention", "full_attention"] * 2
GATED_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": LINEAR_AND_FULL,
}
MAMBA_2 = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
TWO_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
}
"""Of each size another one, so that a mistaken one shows."""
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa-tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mistral-sliding": ("mistral", {"sliding_window": 60}),
    "llama-idle-window": ("llama", {"sliding_window": 24}),
    "gpt-neox": ("gpt_neox", {"num_key_value_heads": 4, "head_dim": 12, "rotary_pct": 0.5}),
    "afmoe": (
        "afmoe",
        {
            "sliding_window": 24,
            "layer_types": SLIDING_AND_FULL,
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "qwen2-bias": ("qwen2", {}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "layer_types": SLIDING_AND_FULL}),
    "qwen3-qk-norm": ("qwen3", {}),
    "gemma2-softcap": ("gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 16, "layer_types": SLIDING_AND_FULL}),
    "gemma3-two-ropes": (
        "gemma3_text",
        {"sliding_window": 24, "query_pre_attn_scalar": 16, "layer_types": SLIDING_AND_FULL},
    ),
    "phi3-partial-rotary": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "cohere2-interleaved": ("cohere2", {"sliding_window": 24, "layer_types": SLIDING_AND_FULL, "logit_scale": 1.0}),
    "smollm3-nope": ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}),
    "granite-multipliers": (
        "granite",
        {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "qwen2-moe-silent-window": (
        "qwen2_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": SLIDING_AND_FULL,
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "gpt-oss-sinks": (
        "gpt_oss",
        {
            "sliding_window": 24,
            "layer_types": SLIDING_AND_FULL,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": YARN,
        },
    ),
    "gemma3n-shared-keys": (
        "gemma3n_text",
        {**PER_LAYER, "altup_num_inputs": 2, "laurel_rank": 8},
    ),
    "deepseek2-latent": ("deepseek_v2", {**LATENT, **EXPERTS, "q_lora_rank": None, "first_k_dense_replace": 2}),
    "deepseek3-latent": ("deepseek_v3", {**LATENT, **EXPERTS, "first_k_dense_replace": 2, "rope_parameters": YARN}),
    "glm4-moe-lite-latent": ("glm4_moe_lite", {**LATENT, **EXPERTS}),
    "minicpm3-latent": ("minicpm3", LATENT),
    "youtu-latent": ("youtu", LATENT),
    "axk1-latent": ("axk1", {**LATENT, **EXPERTS}),
    "llama4-chunked": (
        "llama4_text",
        {
            "attention_chunk_size": 448,
            "floor_scale": 480,
            "no_rope_layers": [1, 0, 1, 0],
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
        },
    ),
    "gemma4-shared-keys": ("gemma4_text", {**PER_LAYER, "global_head_dim": 32, "use_double_wide_mlp": True}),
    "qwen3.5-gated-delta": ("qwen3_5_text", GATED_DELTA),
    "qwen3-next-gated-delta": (
        "qwen3_next",
        {**GATED_DELTA, **TWO_EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
    "olmo-gated-delta": ("olmo_hybrid", {**GATED_DELTA, "linear_num_key_heads": 4}),
    "kimi-linear": (
        "kimi_linear",
        {
            **TWO_EXPERTS,
            "num_key_value_heads": 4,
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "layer_types": LINEAR_AND_FULL,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "moe_intermediate_size": 16,
        },
    ),
    "lfm2-convolution": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 16}),
    "lfm3-convolution": ("lfm3", {"layer_types": ["conv", "full_attention"] * 2}),
    "bamba-mamba-2": ("bamba", {**MAMBA_2, "attn_layer_indices": [1, 3]}),
    "granite-mamba-2": (
        "granitemoehybrid",
        {
            **MAMBA_2,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 32,
        },
    ),
    "nemotron-mamba-2": (
        "nemotron_h",
        {
            "num_hidden_layers": 6,
            "layer_types": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "mlp"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "jamba-mamba": (
        "jamba",
        {**TWO_EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    ),
}

MAIN_FAMILIES = (
    "cohere2-interleaved",
    "gemma2-softcap",
    "gemma3-two-ropes",
    "gemma4-shared-keys",
    "gpt-oss-sinks",
    "llama",
    "qwen2-moe-silent-window",
    "qwen3.5-gated-delta",
)
"""Families that have every pair of features between them: tests run on these unless `--families` names others."""


def chosen_families(option: str) -> list[str]:
    """Return the families that pytest's option `--families` means: main, all that transformers has, or some names.

    Raises:
        KeyError: if there is no such family.
    """
    known = [name for name, (model_type, _) in FAMILIES.items() if model_type in CONFIG_MAPPING]
    names = {"main": MAIN_FAMILIES, "all": known}.get(option) or option.split(",")
    return sorted({name: FAMILIES[name] for name in names})


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>\n{{ message['content'] | trim }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


def build_model(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Draw a tiny model of a family; the same seed gives the same weights."""
    model_type, differences = FAMILIES[name]
    sizes = {**SIZES, **differences, **changes}
    if "layer_types" in sizes:
        sizes["layer_types"] = sizes["layer_types"][: sizes["num_hidden_layers"]]
    config = CONFIG_MAPPING[model_type](**sizes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=stock_attention(name))
    for parameter in model.parameters():
        # Norm weights and biases start as ones and zeros: move them, so that leaving one out shows.
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def build_nested_model(name: str = "gemma3-two-ropes", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Draw a tiny model of a family that can see: its decoder is no child of the model itself, but deeper inside."""
    text = {**SIZES, **FAMILIES[name][1], **changes}
    text["layer_types"] = text["layer_types"][: text["num_hidden_layers"]]
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 28,
        "patch_size": 14,
    }
    config = CONFIG_MAPPING[FAMILIES[name][0].removesuffix("_text")](
        text_config=text, vision_config=vision, mm_tokens_per_image=1
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    assert model.get_decoder() not in model.children()
    return model.eval()


def stock_attention(name: str) -> str:
    """Return an attention of transformers that does all of the family's."""
    return "eager" if "softcap" in name or "sinks" in name else "sdpa"


def build_tokenizer(texts: Callable[[], list[str]]) -> PreTrainedTokenizerFast:
    """Train a small byte-level BPE with a chat template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama 2's: words with a sign for the space in front, and bytes for what it lacks."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abdeimnoprstuß", "\u2581ist", "\u2581d"]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    backend = Tokenizer(models.BPE(vocabulary, [("\u2581", "d")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)
