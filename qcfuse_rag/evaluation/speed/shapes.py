"""Models of well-known shapes with random weights: time depends on sizes alone.

The sizes come from the published `config.json` of each model.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.runtime.language_model import LanguageModel

QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
SHAPES: dict[str, dict[str, object]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        **QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen3-32b": {
        **QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
WINDOW = 1 << 17


def random_model(shape: str, *, device: str | None = None, dtype: str | None = None) -> LanguageModel:
    """Return a model of a known shape with random weights, built on the device."""
    if shape not in SHAPES:
        raise QCFuseError(f"no shape {shape!r}; there are {', '.join(SHAPES)}")
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch_dtype = getattr(torch, dtype or ("float32" if target.type == "cpu" else "bfloat16"), None)
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise QCFuseError(f"no dtype {dtype!r}; bfloat16, float16 and float32 are common")
    config = AutoConfig.for_model(**SHAPES[shape], max_position_embeddings=WINDOW)
    with target:
        model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype)
    model.generation_config.eos_token_id = None  # so that answers have the length asked for
    return LanguageModel.wrap(model.eval(), _byte_tokenizer(), name=shape)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes, for generated text; prompts are made of token ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
