"""Models of known shapes, and the operations and bytes that bound their time (Williams et al., Roofline, CACM 2009)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.models.cpu_weights import Float16Linear, PackedLinear
from qcfuse_rag.models.fingerprint import plain_parts
from qcfuse_rag.models.quantized_weights import FORMATS, quantize_weights
from qcfuse_rag.runtime.device import finish
from qcfuse_rag.runtime.language_model import LanguageModel

WINDOW = 1 << 17
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _config(family: str, kv_heads: int, *sizes: int, **more: object) -> dict[str, object]:
    return {"model_type": family, "num_key_value_heads": kv_heads, **dict(zip(SIZES, sizes, strict=True)), **more}


# From the published `config.json` of each model.
SHAPES = {
    "smollm2-135m": _config("llama", 3, 49152, 576, 1536, 30, 9, tie_word_embeddings=True),
    "qwen3-0.6b": _config("qwen3", 8, 151936, 1024, 3072, 28, 16, head_dim=128, tie_word_embeddings=True),
    "qwen3-8b": _config("qwen3", 8, 151936, 4096, 12288, 36, 32, head_dim=128),
    "qwen3-32b": _config("qwen3", 8, 151936, 5120, 25600, 64, 64, head_dim=128),
    "llama-3.1-8b": _config("llama", 8, 128256, 4096, 14336, 32, 32),
}


def random_model(
    shape: str, *, device: str | None = None, dtype: str | None = None, weights: str | None = None
) -> LanguageModel:
    """Return a model of a known shape with random weights, built on the device, and perhaps quantised there."""
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
    quantized = quantize_weights(model, weights, target) if weights in FORMATS else "model"
    return LanguageModel.wrap(model.eval(), byte_tokenizer(), name=f"{shape}, random weights", weight_format=quantized)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes, for generated text; prompts are made of token ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def seconds(lm: LanguageModel, run: Callable[[], object]) -> float:
    """Time one call, with the work that it leaves to the device."""
    finish(lm.device)
    return fastest_s(lm.device, run, 1)


def fastest_s(device: torch.device, work: Callable[[], object], samples: int) -> float:
    """Return the seconds of the fastest of several runs on the host and a device; other work disturbs it least."""
    times = []
    for _ in range(samples):
        started = time.perf_counter()
        work()
        finish(device)
        times.append(time.perf_counter() - started)
    return min(times)


SAMPLES = 7
"""Measurements of a rate, of which the best counts."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best rates measured here."""

    flops: float  # floating-point operations a second of a large matrix product in the model's dtype
    memory: float  # bytes a second of a large copy in the model's memory; a byte read and written counts twice
    loading: float  # bytes a second from page-locked host memory to the device; on a CPU, those of a copy


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure each rate as the best of `SAMPLES`."""
    gpu = device.type == "cuda"
    size, count = (8192, 1 << 28) if gpu else (1536, 1 << 25)
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    product_s = fastest_s(device, lambda: left @ right, SAMPLES)
    target, source = (torch.randn(count, device=device) for _ in range(2))
    memory = 2 * target.nbytes / fastest_s(device, lambda: target.copy_(source), SAMPLES)
    loading = memory / 2  # a copy reads and writes each byte
    if gpu:
        host = torch.empty(count, pin_memory=True)
        loading = target.nbytes / fastest_s(device, lambda: target.copy_(host), SAMPLES)
    return Ceilings(2 * size**3 / product_s, memory, loading)


def row_operations(lm: LanguageModel, rows: float, tokens: int) -> float:
    """Count the floating-point operations of rows evenly spread over a prompt, and of one row of logits."""
    heads = int(lm.model.config.get_text_config().num_attention_heads)
    attention = sum(2 * (shape.key_dim + shape.value_dim) for shape in lm.shapes) * heads * tokens / 2
    matrices = sum(map(_matrix_numbers, _layer_modules(lm)))
    return rows * (2 * matrices + attention) + 2 * _matrix_numbers(lm.model.get_output_embeddings())


def step_bytes(lm: LanguageModel, tokens: int, requests: int = 1) -> float:
    """Count the bytes that a decode step reads: the weights once, and each request's keys and values."""
    weights = sum(map(_held_bytes, [*_layer_modules(lm), lm.model.get_output_embeddings()]))
    return weights + requests * tokens * lm.kv_bytes_per_token


def _layer_modules(lm: LanguageModel) -> list[nn.Module]:
    """Return all modules but embeddings and output layer."""
    outside = (lm.model.get_input_embeddings(), lm.model.get_output_embeddings())
    return [module for module in lm.model.modules() if all(module is not other for other in outside)]


def _matrix_numbers(module: nn.Module) -> int:
    """Count the numbers of a module's own matrices; a packed matrix counts as the matrix that it stands for."""
    rows, columns = (getattr(module, name, None) for name in ("out_features", "in_features"))
    if isinstance(rows, int) and isinstance(columns, int) and not any(module.children()):
        return rows * columns
    return sum(weight.numel() for weight in module.parameters(recurse=False) if weight.dim() > 1)


def _held_bytes(module: nn.Module) -> int:
    """Count the bytes of a module's own weights as they are held, without scales that are no buffers."""
    if isinstance(module, Float16Linear):
        return 2 * module.in_features * module.out_features
    if isinstance(module, PackedLinear):
        return module.weight.nbytes
    temporary = module._non_persistent_buffers_set
    saved = [x for name, x in module.named_buffers(recurse=False) if name not in temporary]
    own = [*module.parameters(recurse=False), *saved]
    return sum(part.nbytes for tensor in own for _, part in plain_parts("", tensor))
