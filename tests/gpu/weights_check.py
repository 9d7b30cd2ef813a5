"""Measure formats of weights and kinds of layers on a GPU: memory, first token and decode step; nearness of answers."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.floors import WINDOW, byte_tokenizer, random_model, seconds
from benchmarks.speed import decode_steps, fill, random_prompt
from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, make_method
from qcfuse_rag.fusion.pipeline import fuse_prompt
from qcfuse_rag.models.source import QUANTIZED_FORMATS, model_source
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.backends.memory import UNLIMITED
from qcfuse_rag.verification.divergence import answer_logits, compare_answers, greedy_answers
from qcfuse_rag.verification.exactness import measure_exactness

LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32},
    "lfm2": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
             "layer_types": [*["conv", "conv", "full_attention"] * 3, *["conv", "full_attention"] * 3, "conv"]},
    "granitemoehybrid": {"hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 32,
                         "num_key_value_heads": 8, "layer_types": (["mamba"] * 9 + ["attention"]) * 4,
                         "shared_intermediate_size": 8192, "num_local_experts": 0, "num_experts_per_tok": 0,
                         "mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128},
    "deepseek_v2": {"hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
                    "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
                    "v_head_dim": 128, "intermediate_size": 10944, "moe_intermediate_size": 1408,
                    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
                    "first_k_dense_replace": 1},
}  # fmt: skip
"""Sizes of models with recurrent layers (Qwen3.5 4B, LFM2 1.2B, Granite 4 micro) and latents (DeepSeek V2 Lite)."""
VOCABULARY = 50_000
FORMATS = ("model", *QUANTIZED_FORMATS)
CONTEXT, CHUNK, ROWS, REQUESTS, REPEATS = 10240, 512, (640,), (1, 8), 5
FULL, FUSED = make_method("full"), make_method("auto", ratio=0.05).unguarded
GB = 1e9


def measure_shape(shape: str, weights: str, device: str | None = None, context: int = CONTEXT) -> dict[str, Any]:
    """Measure a shape with random weights in a format."""
    return measure_speed(random_model(shape, device=device, weights=weights), context)


def measure_layers(model_type: str, sizes: dict[str, Any], device: str = "cuda", context: int = 4096) -> dict[str, Any]:
    """Compare a model of these sizes with its own code, then measure it; weights are random, in bfloat16."""
    config = AutoConfig.for_model(model_type, **sizes, vocab_size=VOCABULARY, max_position_embeddings=WINDOW)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    lm = LanguageModel.wrap(model.eval(), byte_tokenizer(), name=model_type)
    exact = measure_exactness(lm).to_dict()
    print(model_type, exact, flush=True)
    return {"exact": exact, **measure_speed(lm, context)}


@torch.inference_mode()
def measure_speed(lm: LanguageModel, context: int) -> dict[str, Any]:
    """Measure a model with random weights: bytes, milliseconds, and why nothing is recorded."""
    on_cuda = lm.device.type == "cuda"
    collect()
    found: dict[str, Any] = {"format": lm.number_formats, "weights, GB": _allocated() if on_cuda else None}
    runner = ModelRunner(lm, MemoryStore(UNLIMITED, pinned=on_cuda))
    recorded_s = [
        seconds(lm, lambda: runner.prefills.compile(ROWS)),
        seconds(lm, lambda: runner.decodes.compile(REQUESTS)),
    ]
    found["recording, s"] = recorded_s
    found["refusals"] = [runner.prefills.refusal, runner.decodes.refusal]
    found["step is fused"] = lm.fused_model is not lm.model
    prompt = random_prompt(lm, context, CHUNK, torch.Generator().manual_seed(0))
    fill(lm, [runner.store], prompt, [FUSED])
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for name, method, repeats in (("full", FULL, 2), ("auto, 5 %", FUSED, REPEATS)):
        fuse_prompt(runner, prompt, method)
        times = [fuse_prompt(runner, prompt, method).report.timings.ttft_s for _ in range(repeats)]
        found[f"first token, {name}, ms"] = 1000 * median(times)
    found["guard"] = fuse_prompt(runner, prompt, make_method("auto", ratio=0.05)).report.fallback or "fuses"
    prefilled = fuse_prompt(runner, prompt, FUSED, answer_tokens=16)
    if on_cuda:
        found["peak with a prompt, GB"] = torch.cuda.max_memory_allocated() / GB
    print(lm.name, found, flush=True)  # before steps, which another version of transformers may refuse
    for row in decode_steps(lm, runner.decodes, prefilled, REQUESTS):
        found[f"step of {row['requests']}, ms"] = 1000 * row["step_s"]
        found[f"bytes of a step of {row['requests']}, GB"] = row["bytes"] / GB
        if row["transformers_step_s"] is not None:
            found["step of transformers, ms"] = 1000 * row["transformers_step_s"]
    return found


def measure_model(model: str, prompts: Sequence[tuple[str, Sequence[str]]], weights: str) -> dict[str, Any]:
    """Compare full prefill by a real model in a format with that in bfloat16, along its answers: nats a token."""
    found: dict[str, Any] = {}
    answers = []
    for name in ("model", weights):
        engine = FusionEngine(LanguageModel.load(model, dtype="bfloat16", weights=name), MemoryStore(), method=FULL)
        exact = measure_exactness(engine.lm)
        found[name] = {"exact": exact.passed, "all rows": exact.all_rows, "allowed": exact.tolerance}
        for index, (question, passages) in enumerate(prompts):
            prefilled = engine.prefill(engine.prompt(question, passages), answer_tokens=32)
            if name == "model":
                answers += greedy_answers(engine.runner, [prefilled], 32)
            else:
                ids, logits = answers[index]
                compared = compare_answers(logits, answer_logits(engine.runner, prefilled, ids))
                found.setdefault("compared", []).append((compared.mean_kl, compared.identical))
        del engine
        collect()
    compared = found.pop("compared", [])
    found["KL, nats a token"] = sum(kl for kl, _ in compared) / len(compared)
    found["identical answers"] = f"{sum(same for _, same in compared)} of {len(compared)}"
    return found


def save_plain(model: str, folder: Path) -> None:
    """Save a real model in bfloat16, not quantised."""
    source, options = model_source(model)
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **options)
    del plain.config.quantization_config
    plain.hf_quantizer = None
    for part in (plain, AutoTokenizer.from_pretrained(source, **options)):
        part.save_pretrained(folder)


def measure_checkpoint(plain: Path, settings: Any, device: str = "cuda") -> dict[str, Any]:
    """Save a model as transformers quantises it, load that checkpoint, and check it as an engine does."""
    with TemporaryDirectory() as folder:
        quantized = AutoModelForCausalLM.from_pretrained(
            plain, dtype=torch.bfloat16, quantization_config=settings, device_map={"": device}
        )
        for part in (quantized, AutoTokenizer.from_pretrained(plain)):
            part.save_pretrained(folder)
        del quantized
        lm = LanguageModel.load(folder, device=device)
        exact = measure_exactness(lm)
        found: dict[str, Any] = {"exact": exact.passed, "all rows": exact.all_rows, "allowed": exact.tolerance}
        if device == "cuda":
            runner = ModelRunner(lm, MemoryStore())
            runner.prefills.compile((64,))
            runner.decodes.compile((1,))
            found["refusals"] = [runner.prefills.refusal, runner.decodes.refusal]
    return found


def checkpoint_settings() -> dict[str, Any]:
    """Return transformers' settings of formats that users' checkpoints have, and that it can write here."""
    from torchao.quantization import Int8WeightOnlyConfig

    four_bit = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    return {
        "bitsandbytes nf4": transformers.BitsAndBytesConfig(**four_bit),
        "bitsandbytes nf4, double": transformers.BitsAndBytesConfig(**four_bit, bnb_4bit_use_double_quant=True),
        "bitsandbytes int8": transformers.BitsAndBytesConfig(load_in_8bit=True),
        "torchao int8": transformers.TorchAoConfig(Int8WeightOnlyConfig(version=2)),
    }


def collect() -> None:
    """Free what is no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _allocated() -> float:
    return torch.cuda.memory_allocated() / GB
