"""Compare formats of weights on a GPU: memory, first token and decode step of a shape, and nearness of a real model."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.floors import random_model, seconds
from benchmarks.speed import decode_steps, fill, random_prompt
from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, make_method
from qcfuse_rag.fusion.pipeline import fuse_prompt
from qcfuse_rag.models.source import QUANTIZED_FORMATS, model_source
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.backends.memory import UNLIMITED
from qcfuse_rag.verification.divergence import answer_logits, compare_answers, greedy_answer
from qcfuse_rag.verification.exactness import measure_exactness

FORMATS = ("model", *QUANTIZED_FORMATS)
CONTEXT, CHUNK, ROWS, REQUESTS, REPEATS = 10240, 512, (640,), (1, 8), 5
FULL, FUSED = make_method("full"), make_method("auto", ratio=0.05).unguarded
GB = 1e9


@torch.inference_mode()
def measure_shape(shape: str, weights: str, device: str | None = None, context: int = CONTEXT) -> dict[str, Any]:
    """Measure a shape with random weights in a format: bytes, milliseconds, and why nothing is recorded."""
    on_cuda = device is None
    lm = random_model(shape, device=device, weights=weights)
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
    found["product of one weight, ms"] = {rows: _product_ms(lm, rows) for rows in (1, 8, 32, 128, 512, 2048)}
    prompt = random_prompt(lm, context, CHUNK, torch.Generator().manual_seed(0))
    fill(lm, [runner.store], prompt, [FUSED])
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for name, method, repeats in (("full", FULL, 2), ("auto, 5 %", FUSED, REPEATS)):
        fuse_prompt(runner, prompt, method)
        times = [fuse_prompt(runner, prompt, method).report.timings.ttft_s for _ in range(repeats)]
        found[f"first token, {name}, ms"] = 1000 * median(times)
    prefilled = fuse_prompt(runner, prompt, FUSED, answer_tokens=16)
    if on_cuda:
        found["peak with a prompt, GB"] = torch.cuda.max_memory_allocated() / GB
    for row in decode_steps(lm, runner.decodes, prefilled, REQUESTS):
        found[f"step of {row['requests']}, ms"] = 1000 * row["step_s"]
        found[f"bytes of a step of {row['requests']}, GB"] = row["bytes"] / GB
        if row["transformers_step_s"] is not None:
            found["step of transformers, ms"] = 1000 * row["transformers_step_s"]
    return found


def _product_ms(lm: LanguageModel, rows: int) -> float:
    """Time the products of some rows with the gate of each layer, by the library; milliseconds a layer."""
    linears = [layer.mlp.gate_proj for layer in lm.model.get_decoder().layers]
    given = torch.randn(1, rows, linears[0].in_features, device=lm.device, dtype=lm.dtype)
    times = [seconds(lm, lambda: [linear(given) for linear in linears]) for _ in range(REPEATS)]
    return 1000 * median(times) / len(linears)


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
                answers.append(greedy_answer(engine.runner, prefilled, 32))
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


def measure_checkpoint(model: str, settings: Any, device: str = "cuda") -> dict[str, Any]:
    """Save a real model as transformers quantises it, load that checkpoint, and check it as an engine does."""
    source, options = model_source(model)
    with TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **options)
        del plain.config.quantization_config
        plain.hf_quantizer = None
        plain.save_pretrained(Path(folder) / "plain")
        quantized = AutoModelForCausalLM.from_pretrained(
            Path(folder) / "plain", dtype=torch.bfloat16, quantization_config=settings, device_map={"": device}
        )
        for part in (quantized, tokenizer):
            part.save_pretrained(Path(folder) / "quantized")
        del plain, quantized
        lm = LanguageModel.load(str(Path(folder) / "quantized"), device=device)
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
