"""Measure an engine on a GPU as users run it: load, warm, answer alone and in a batch, answer a second turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from qcfuse_rag import FusionEngine, MemoryStore, Prompt, SamplingParams, make_method
from qcfuse_rag.bundled import corpus, questions
from qcfuse_rag.engine.scheduler import Scheduler
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.prefix_cache import common_length
from qcfuse_rag.store.backends.memory import UNLIMITED

PARAMS, REQUESTS, DOCUMENTS = SamplingParams(max_new_tokens=32), 8, 4
METHODS = {
    "full": make_method("full"),
    "reuse": make_method("reuse"),
    "auto, 5 %": make_method("auto", ratio=0.05),
}
ANSWERED = {
    "full": make_method("full"),
    "auto, 5 %": make_method("auto", ratio=0.05).unguarded,
    "auto, 15 %": make_method("auto", ratio=0.15).unguarded,
}


def answer_ids(model: str, device: str, dtype: str) -> dict[str, list[list[int]]]:
    """Return the ids of answers to all questions by method, so that those of two devices can be compared.

    Nothing depends on time: there are no guards, and no answer takes the beginning of another.
    """
    texts = corpus()
    others = list(texts)[:DOCUMENTS]
    named = [dict.fromkeys([*item.documents, *others]) for item in questions()]
    asked = [(item.question, [texts[name] for name in names]) for item, names in zip(questions(), named, strict=True)]
    options = {"device": device, "dtype": dtype, "weights": "model", "prefix_bytes": 0}
    store = MemoryStore(UNLIMITED)
    with FusionEngine.load(model, store=store, method=ANSWERED["auto, 5 %"], verdict="ignore", **options) as engine:
        engine.warm(text for _, passages in asked for text in passages)
        prompts = [engine.prompt(question, passages) for question, passages in asked]
        return {
            name: [list(engine.generate(prompt, PARAMS, method=method).ids) for prompt in prompts]
            for name, method in ANSWERED.items()
        }


def measure_engine(model: str, device: str, dtype: str) -> dict[str, Any]:
    """Load a model as `FusionEngine.load` does by default, and answer questions about the bundled corpus.

    Times are seconds. Answers are compared token by token: in half precision near ties may go either way.
    """
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        with FusionEngine.load(model, store=Path(folder), device=device, dtype=dtype) as engine:
            found: dict[str, Any] = {
                "load, s": time.perf_counter() - began,
                "passes, refusal": engine.runner.prefills.refusal,
                "steps, refusal": engine.runner.decodes.refusal,
            }
            summary = engine.warm(corpus().values())
            found["warm"] = {"tokens": summary.tokens, "s": summary.elapsed_s}
            for name, method in METHODS.items():
                found[name] = [_answer(engine, prompt, method) for prompt in _prompts(engine)[:2]]
            found["second turn"] = _second_turn(engine)
            found["equal tokens, together and one by one"] = _together(engine)
    return found


def _prompts(engine: FusionEngine) -> list[Prompt]:
    texts = corpus()
    asked = questions()[:REQUESTS]
    others = list(texts.values())[:DOCUMENTS]
    return [engine.prompt(item.question, [*(texts[name] for name in item.documents), *others]) for item in asked]


def _answer(engine: FusionEngine, prompt: Prompt, method: Method) -> dict[str, Any]:
    began = time.perf_counter()
    stream = engine.stream(prompt, PARAMS, method=method)
    first_s = time.perf_counter() - began
    answer = stream.result()
    whole_s = time.perf_counter() - began
    full = engine.generate(prompt, PARAMS, method=METHODS["full"])
    report = stream.report
    return {
        "prompt": report.prompt_tokens,
        "rows": report.rows,
        "fallback": report.fallback,
        "first token, s": first_s,
        "stages, s": report.timings.stages,
        "a token, s": (whole_s - first_s) / max(1, len(answer.ids) - 1),
        "equal tokens": f"{_equal(answer.ids, full.ids)} of {len(full.ids)}",
    }


def _second_turn(engine: FusionEngine) -> dict[str, Any]:
    engine.prefixes.clear()
    texts = list(corpus().values())[:DOCUMENTS]
    first = engine.generate(engine.prompt("What are these texts about?", texts), PARAMS)
    history = [
        {"role": "user", "content": "What are these texts about?"},
        {"role": "assistant", "content": first.text},
    ]
    report = engine.stream(engine.prompt("And the last one?", texts, history), PARAMS).report
    return {"prompt": report.prompt_tokens, "prefix": report.prefix_tokens, "rows": report.rows}


def _together(engine: FusionEngine) -> list[str]:
    """Answer prompts one by one and then in one batch; return for each how many tokens are equal."""
    engine.prefixes.clear()
    prompts = _prompts(engine)
    alone = [engine.generate(prompt, PARAMS) for prompt in prompts]
    engine.prefixes.clear()
    with Scheduler(engine) as scheduler:
        handles = [scheduler.submit(prompt, PARAMS) for prompt in prompts]
        together = [handle.result() for handle in handles]
    pairs = zip(alone, together, strict=True)
    return [f"{_equal(answer.ids, other.ids)} of {len(answer.ids)}" for answer, other in pairs]


def _equal(ids: Sequence[int], expected: Sequence[int]) -> int:
    """Return the number of leading tokens that two answers share."""
    return common_length(np.asarray(ids), np.asarray(expected))
