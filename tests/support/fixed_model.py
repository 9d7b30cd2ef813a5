"""A tiny model with weights computed from integers, so that stores of other versions fit it bit for bit."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from tests.support.families import CHAT_TEMPLATE

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")


def fixed_model() -> PreTrainedModel:
    """Return a Llama of two layers; every weight is a fixed function of its index, so no random generator matters."""
    config = LlamaConfig(
        vocab_size=len(SPECIAL_TOKENS) + 256,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    for number, (_, weight) in enumerate(sorted(model.state_dict().items())):
        indices = torch.arange(weight.numel(), dtype=torch.int64)
        # Multiplicative hashing gives 16 bits, hence numbers that float32 holds exactly, between -0.5 and 0.5.
        bits = (((indices + 1) * 2654435761 + (number + 1) * 40503 * 65537) // 65536) % 65536
        spread = (bits.to(torch.float64) / 65536 - 0.5).reshape(weight.shape)
        weight.copy_(1.0 + 0.25 * spread if weight.ndim == 1 else spread)
    return model.eval()


def fixed_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte; nothing is trained."""
    symbols = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(symbols)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )
