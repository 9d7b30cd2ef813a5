"""Models of well-known shapes with random weights: time depends on sizes alone."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from qcfuse_rag.cli.capacity import SHAPES
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.runtime.language_model import LanguageModel

WINDOW = 1 << 17


def random_model(shape: str, *, device: str | None = None, dtype: str | None = None) -> LanguageModel:
    """Return a model of a known shape with random weights, built on the device."""
    if shape not in SHAPES:
        raise QCFuseError(f"there is no shape {shape!r}; there are {', '.join(SHAPES)}")
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch_dtype = getattr(torch, dtype or ("float32" if target.type == "cpu" else "bfloat16"), None)
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise QCFuseError(f"there is no dtype {dtype!r}; bfloat16, float16 and float32 are common")
    config = AutoConfig.for_model(**SHAPES[shape], max_position_embeddings=WINDOW)
    with target:
        model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype)
    model.generation_config.eos_token_id = None  # so that answers have the length asked for
    return LanguageModel.wrap(model.eval(), _byte_tokenizer(), name=f"{shape}, random weights")


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes, for generated text; prompts are made of token ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
