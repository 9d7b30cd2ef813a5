"""List which causal language models of the installed transformers the engine takes, and why it refuses the others.

Each type is built as small as its default configuration allows, with random weights, and checked as `qcfuse models
check` does. If it cannot be built or run so small, the check of its configuration alone can refuse it.

    python scripts/list_models.py > tests/models/supported.txt
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qcfuse_rag.errors import UnsupportedModel
from qcfuse_rag.models.compatibility import refuse_unsupported, refusing_errors
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.verification.exactness import check_exact

VOCABULARY, LAYERS = 256, 4
NAMES = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    LAYERS: "num_hidden_layers num_layers n_layer n_layers num_attention_heads num_heads n_head n_heads",
    0: "pad_token_id",
    1: "n_group topk_group first_k_dense_replace n_shared_experts bos_token_id num_expert_group attn_layer_offset",
    2: "num_key_value_heads num_experts num_local_experts n_routed_experts moe_num_experts num_experts_per_tok moe_k "
    "num_experts_per_token num_kv_shared_layers attn_layer_period mamba_n_heads",
    16: "head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim q_lora_rank kv_lora_rank hidden_size_per_layer_input",
    24: "sliding_window",
    64: "hidden_size n_embd d_model intermediate_size ffn_dim n_inner moe_intermediate_size "
    "shared_expert_intermediate_size word_embed_proj_dim",
    512: "max_position_embeddings n_positions n_ctx",
}
"""Small sizes, and what configurations call them."""
SMALL = {name: size for size, names in NAMES.items() for name in names.split()} | {"initializer_range": 0.15}
HYBRID = ["linear_attention", "full_attention"]
FILLED = {"num_key_value_heads", "head_dim", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"}
FILLED |= {"n_shared_experts", "pad_token_id", "bos_token_id"}
"""Sizes that a model may need although its default configuration has None."""


def small_sizes(config: PreTrainedConfig) -> dict[str, Any]:
    """Return small sizes for those that a configuration has, and for the configurations inside it."""
    plain = config.to_dict()
    sizes: dict[str, Any] = {
        name: size
        for name, size in SMALL.items()
        if isinstance(plain.get(name), int | float) or (name in FILLED and name in plain)
    }
    if "qk_rope_head_dim" in plain:  # latent attention has as many heads of keys as of queries
        sizes["num_key_value_heads"] = LAYERS
    if "conv_L_cache" in plain:
        sizes["layer_types"] = ["conv", "full_attention"] * 2
    elif plain.get("layer_types"):
        kinds = [*dict.fromkeys(plain["layer_types"])]
        sizes["layer_types"] = ((kinds if kinds != ["linear_attention"] else HYBRID) * LAYERS)[:LAYERS]
    if "attn_layer_indices" in plain:
        sizes["attn_layer_indices"] = [1, 3]
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    return sizes | {name: small_sizes(part) for name, part in parts.items() if isinstance(part, PreTrainedConfig)}


def small_model(model_type: str) -> PreTrainedModel:
    """Draw a small model and run it on a few tokens."""
    sizes = small_sizes(CONFIG_MAPPING[model_type]()) | {"pad_token_id": 0, "bos_token_id": 1}
    config = CONFIG_MAPPING[model_type](**sizes)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.inference_mode():
        model(torch.arange(5, 15)[None])
    return model


def verdict(model_type: str, tokenizer: PreTrainedTokenizerFast) -> tuple[str, str]:
    """Return whether models of a type are `accepted`, `refused` or `unknown`, and the reason."""
    model, unknown = None, ""
    try:
        model = small_model(model_type)
    except Exception as error:  # of whatever a model has
        unknown = f"does not run with small sizes: {type(error).__name__}"
        with suppress(Exception), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type]())
    if model is None:
        return "unknown", unknown
    try:
        if unknown:
            with refusing_errors(model):
                refuse_unsupported(model)
            return "unknown", unknown
        check_exact(LanguageModel.wrap(model, tokenizer))
    except UnsupportedModel as refusal:
        reason = str(refusal).replace(type(model).__name__, "the class")
        return "refused", re.split(r"[:;(]", re.sub(r"\d[\d.,]*", "N", reason))[0].strip()
    except Exception as error:
        return "unknown", f"the check itself fails: {type(error).__name__}"
    return "accepted", ""


def table() -> Iterator[str]:
    """Yield a line for each type of model: class, type, verdict and reason."""
    words = Tokenizer(models.WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", bos_token="1", eos_token="2")
    for model_type, name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        yield " | ".join(filter(None, (name, model_type, *verdict(model_type, tokenizer))))


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    print(f"# transformers {transformers.__version__}")
    for line in table():
        print(line, flush=True)


if __name__ == "__main__":
    main()
