"""Measure on a GPU how many answers are full prefill's, and requests that arrive one by one."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.speed import fill, random_prompt
from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, SamplingParams, make_method
from qcfuse_rag.engine.scheduler import RequestHandle, Scheduler
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.store.backends.memory import UNLIMITED

FUSED = make_method("auto", ratio=0.05).unguarded
CHUNK = 512


def healed_answers(
    model: str, questions: Sequence[tuple[str, Sequence[str]]], device: str, dtype: str, new_tokens: int = 32
) -> dict[str, Any]:
    """Answer by full prefill, over fused caches and exactly; count full prefill's answers."""
    lm = LanguageModel.load(model, device=device, dtype=dtype)
    with FusionEngine(lm, MemoryStore(UNLIMITED), method=FUSED) as engine:
        engine.compile()
        found: dict[str, Any] = {}
        same = dict.fromkeys(("fast", "exact"), 0)
        s = dict.fromkeys(("full", "fast", "exact"), 0.0)
        tokens = dict.fromkeys(s, 0)
        for question, passages in questions:
            engine.warm(passages)
            prompt = engine.prompt(question, passages)
            ids = {}
            for name in s:
                params = SamplingParams(max_new_tokens=new_tokens, fidelity="fast" if name == "full" else name)
                stream = engine.stream(prompt, params, method=make_method("full") if name == "full" else FUSED)
                began = time.perf_counter()
                ids[name] = stream.result().ids
                s[name] += time.perf_counter() - began
                tokens[name] += len(ids[name])
            for name in same:
                same[name] += ids[name] == ids["full"]
        found["full prefill's answers"] = {name: f"{count} of {len(questions)}" for name, count in same.items()}
        found["a token, ms"] = {name: 1000 * s[name] / tokens[name] for name in s}
    return found


def measure_arrivals(
    runner_lm: LanguageModel, context: int, requests: int, new_tokens: int, rate: float, *, device: str = "cuda"
) -> dict[str, Any]:
    """Serve requests that arrive at random (Poisson), each over passages of its own, and all at once.

    transformers' continuous batching gets the same token ids all at once; it has no reuse.
    """
    engine = FusionEngine(runner_lm, MemoryStore(UNLIMITED, pinned=device == "cuda"), method=FUSED)
    engine.compile()
    generator, params = torch.Generator().manual_seed(5), SamplingParams(max_new_tokens=new_tokens)
    prompts = [random_prompt(runner_lm, context, CHUNK, generator) for _ in range(requests)]
    for prompt in prompts:
        fill(runner_lm, [engine.store], prompt, [FUSED])
    waits = random.Random(0)
    found: dict[str, Any] = {}
    with Scheduler(engine) as scheduler:
        scheduler.submit(prompts[0], params).result()
        for name, gaps in (
            ("all at once", [0.0] * requests),
            (f"{rate:g} a second", [waits.expovariate(rate) for _ in prompts]),
        ):
            found[name] = _serve(scheduler, prompts, params, gaps)
    engine.close()
    inputs = [list(prompt.ids) for prompt in prompts]
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # By default it takes nine tenths of the free memory, also from processes that share the GPU.
    sizes = {"block_size": 256, "num_blocks": requests * (context // 128 + 1), "max_batch_tokens": 8192}
    batching, name = ContinuousBatchingConfig(**sizes), runner_lm.model.config._attn_implementation
    try:
        runner_lm.model.set_attn_implementation("sdpa")
        for asked in (inputs[:1], inputs):  # the first is slower
            began = time.perf_counter()
            out = runner_lm.model.generate_batch(asked, generation_config=config, continuous_batching_config=batching)
            elapsed = time.perf_counter() - began
        count = sum(len(answer.generated_tokens) for answer in out.values())
        found["transformers, all at once"] = {"s": elapsed, "tokens a second": count / elapsed}
    except Exception as error:  # of a library whose interface changes
        found["transformers"] = f"{type(error).__name__}: {error}"
    finally:
        runner_lm.model.set_attn_implementation(name)
    return found


def _serve(
    scheduler: Scheduler, prompts: Sequence[Prompt], params: SamplingParams, gaps: Sequence[float]
) -> dict[str, Any]:
    first_s, whole_s, began = list[float](), list[float](), time.perf_counter()
    tokens = list[int]()

    def read(handle: RequestHandle, submitted: float) -> None:
        while handle.report is None and not handle.is_finished:
            time.sleep(0.001)
        first_s.append(time.perf_counter() - submitted)
        tokens.append(len(handle.result().ids))
        whole_s.append(time.perf_counter() - submitted)

    readers = []
    for prompt, gap in zip(prompts, gaps, strict=True):
        time.sleep(gap)
        submitted = time.perf_counter()
        reader = threading.Thread(target=read, args=(scheduler.submit(prompt, params), submitted))
        reader.start()
        readers.append(reader)
    for reader in readers:
        reader.join()
    elapsed = time.perf_counter() - began
    return {
        "s": elapsed,
        "tokens a second": sum(tokens) / elapsed,
        "first token, median s": median(first_s),
        "first token, longest s": max(first_s),
        "whole answer, median s": median(whole_s),
    }
