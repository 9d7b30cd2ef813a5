"""Run the first passes of a process before a request waits for them, and time those of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from math import ceil

import torch

from qcfuse_rag.fusion.lookup import plan_lookups
from qcfuse_rag.fusion.method import FixedRatio, Method
from qcfuse_rag.fusion.pipeline import fuse_prompt
from qcfuse_rag.fusion.probes import QuestionProbe
from qcfuse_rag.fusion.selectors import TopTokens
from qcfuse_rag.generation.decoding import TextStream
from qcfuse_rag.generation.sampling_params import SamplingParams
from qcfuse_rag.ingestion.prefill import PrefillTarget
from qcfuse_rag.ingestion.primer import PRIMER
from qcfuse_rag.ingestion.warm_job import WarmJob
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.segments import Prompt, Role, Segment
from qcfuse_rag.runtime.kernels.support import kernels_available
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.learned_costs import overlaps
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.backends.memory import MemoryStore
from qcfuse_rag.store.key import FRAMED

TOKENS = 64
"""Tokens of a passage."""
SAMPLES = 3
"""Timed prefills of each size; the fastest counts."""
GPU_TOKENS = (0, 4096, 8192)
"""Passage tokens of full prefills: the first takes as long as launching, two tell what rows and the keys they see cost.
"""
FEW_PASSAGES, MANY_PASSAGES = 2, 18
"""Passages of a prompt. With many, kernels split the keys, which is compiled separately."""
SHORT_QUESTION, LONG_QUESTION = 1, 32
"""Tokens of a question. Of a short one kernels take all rows at once, which is compiled separately too."""
SMALL_SHARE, LARGE_SHARE = 0.1, 0.9
"""Shares to recompute. Of very many rows kernels take larger tiles, see `runtime.kernels.launch`."""


def run_first_passes(runner: ModelRunner, prompts: PromptBuilder) -> None:
    """Warm a passage, fuse prompts of it and decode two tokens, so that kernels are compiled and libraries initialised.

    The runner's store is left alone.
    """
    runner = _over_a_passage(runner, prompts)
    for n_passages, question_tokens, ratio in _prompt_shapes(runner.lm):
        prompt = _prompt(prompts, n_passages, question_tokens)
        if len(prompt) + 2 <= runner.lm.context_window.tokens:
            method = _method(ratio)
            prefilled = fuse_prompt(runner, prompt, method, answer_tokens=2)
            TextStream(runner, prefilled, SamplingParams(max_new_tokens=2)).result()


def measure_passes(runner: ModelRunner, prompts: PromptBuilder) -> None:
    """Run full prefills and recorded passes on a GPU, so that its costs are known before the first request."""
    runner.costs.recorded_pass_s = recorded_pass_s(runner, prompts)
    for tokens in GPU_TOKENS if overlaps(runner.lm) else ():
        prompt = _prompt(prompts, tokens // TOKENS, SHORT_QUESTION)
        if len(prompt) <= runner.lm.context_window.tokens:
            with suppress(torch.OutOfMemoryError):
                for _ in range(SAMPLES):
                    fuse_prompt(runner, prompt, Method("first passes", base=None))


def recorded_pass_s(runner: ModelRunner, prompts: PromptBuilder) -> float | None:
    """Return the fixed seconds of a recorded pass in a fused prefill; None where passes are not recorded.

    A short fused prefill is timed, of which the passes' fixed costs, lookups and the start of loading are most.
    """
    prompt = _prompt(prompts, MANY_PASSAGES, LONG_QUESTION)
    if runner.prefills.refusal is not None or len(prompt) > runner.lm.context_window.tokens:
        return None
    here = _over_a_passage(runner, prompts)
    method = _method(SMALL_SHARE)
    share = plan_lookups(runner.lm, here.store, prompt, method).estimate.probe_share
    return min(fuse_prompt(here, prompt, method).report.timings.ttft_s for _ in range(SAMPLES)) / (1 + share)


def _method(ratio: float) -> Method:
    return Method("first passes", FRAMED, probe=QuestionProbe(), selector=TopTokens(), budget=FixedRatio(ratio))


def _over_a_passage(runner: ModelRunner, prompts: PromptBuilder) -> ModelRunner:
    lm, text = runner.lm, prompts.chunk_ids(PRIMER[0])
    here = runner.with_store(MemoryStore(kv_dtype=runner.store.kv_dtype))  # page-locked from now on, as an engine's
    WarmJob(PrefillTarget(lm, here.store, prompts.prefix_ids or text[:1]), [text[:TOKENS]], bases=(FRAMED,)).run()
    return here


def _prompt(prompts: PromptBuilder, n_passages: int, question_tokens: int) -> Prompt:
    text = prompts.chunk_ids(PRIMER[0])
    prefix_ids = prompts.prefix_ids or text[:1]
    segments = [
        (Role.SYSTEM_PREFIX, prefix_ids),
        *[(Role.CHUNK, text[:TOKENS])] * n_passages,
        (Role.QUESTION, text[:question_tokens]),
    ]
    return Prompt(tuple(Segment(role, ids, "") for role, ids in segments), prefix_ids=prefix_ids)


def _prompt_shapes(lm: LanguageModel) -> Iterator[tuple[int, int, float]]:
    """Yield numbers of passages, question tokens and shares to recompute that together use every form of a kernel."""
    dim = lm.widest_head
    if not kernels_available(lm.device, lm.dtype, dim):
        yield FEW_PASSAGES, LONG_QUESTION, SMALL_SHARE
        return
    from qcfuse_rag.runtime.kernels.launch import min_rows_for_large_tile
    from qcfuse_rag.runtime.kernels.sparse_attention import supports_large_tile  # needs Triton

    for n_passages, question_tokens in product((FEW_PASSAGES, MANY_PASSAGES), (SHORT_QUESTION, LONG_QUESTION)):
        yield n_passages, question_tokens, SMALL_SHARE
    if supports_large_tile(lm.device, lm.dtype, dim):
        heads = int(lm.model.config.get_text_config().num_attention_heads)
        rows = max(min_rows_for_large_tile(shape.kv_heads, lm.device) * shape.kv_heads for shape in lm.shapes) / heads
        yield ceil(rows / (LARGE_SHARE * TOKENS)) + 1, LONG_QUESTION, LARGE_SHARE
