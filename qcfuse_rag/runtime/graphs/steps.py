"""Decode steps as CUDA graphs.

A recorded step reads its tokens, positions and buffer addresses from its own tensors, so that one graph serves any
requests of any length, up to a number of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_plan
from qcfuse_rag.runtime.graphs.recorder import GraphRecorder, SamplePrompt, recording_refusal
from qcfuse_rag.runtime.kernels.limits import relative_error
from qcfuse_rag.runtime.kv_table import RebindableKVTable
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.table_plan import TablePlan

CHECKED_POSITIONS = (5, 6, 200)
"""Positions at which a recorded step is checked: it must not depend on the position at which it was recorded."""

Replay = Callable[["StepGraph", Sequence[int], Sequence[int], Sequence[KVBuffer]], Tensor]


@dataclass(slots=True, eq=False)
class StepGraph:
    """A recorded step.

    Attributes:
        inputs: `[2, B]` int64 tokens and positions, read by the step.
        requests: the table of the buffers that the step reads and writes.
        plan: the plan that was recorded.
        logits: `[B, vocabulary]` float32, written by the step.
        replay: computes the step.
    """

    inputs: Tensor
    requests: RebindableKVTable
    plan: TablePlan
    logits: Tensor
    replay: Callable[[], None]


def record_steps(
    lm: LanguageModel, requests: Sequence[int], open_recorder: Callable[[], GraphRecorder], replay: Replay
) -> tuple[dict[int, StepGraph], dict[int, str]]:
    """Record and check steps; return all of them, or why they cannot be used."""
    graphs: dict[int, StepGraph] = {}

    def record() -> list[float]:
        recorder = open_recorder()
        graphs.update({count: _record_step(lm, count, recorder) for count in requests})
        length = min(max(CHECKED_POSITIONS) + 1, lm.context_window.tokens)
        samples = [SamplePrompt.of(lm, length, seed) for seed in range(max(requests, default=0))]
        return [error for graph in graphs.values() for error in _errors(lm, graph, samples, replay)]

    refusal = recording_refusal(lm, record)
    return (graphs, {}) if refusal is None else ({}, dict.fromkeys(requests, refusal))


@torch.inference_mode()
def _record_step(lm: LanguageModel, requests: int, recorder: GraphRecorder) -> StepGraph:
    inputs = torch.zeros(2, requests, dtype=torch.int64, device=lm.device)
    table = RebindableKVTable(lm.empty_buffer(1), lm.shapes, requests, lm.context_window.tokens)
    plan = TablePlan(inputs[1][:, None], table.table, lm.sliding)
    logits, replay = recorder.record(lambda: forward_plan(lm.fused_model, inputs[0], plan))
    return StepGraph(inputs, table, plan, logits, replay)


@torch.inference_mode()
def _errors(lm: LanguageModel, graph: StepGraph, samples: Sequence[SamplePrompt], replay: Replay) -> list[float]:
    """Return the errors of a recorded step against its kernels launched one by one; once with a request less."""
    errors, size = [], graph.inputs.shape[1]
    for round_, last in enumerate(min(position, lm.context_window.tokens - 1) for position in CHECKED_POSITIONS):
        positions = [max(0, last - 3 * request) for request in range(max(1, size - round_ % 2))]
        prompts = samples[: len(positions)]
        tokens = [int(prompt.ids[position]) for prompt, position in zip(prompts, positions, strict=True)]
        buffers = [
            prompt.without(torch.tensor([position], device=lm.device), last + 1)
            for prompt, position in zip(prompts, positions, strict=True)
        ]
        replayed = replay(graph, tokens, positions, buffers)
        launched = forward_plan(lm.fused_model, graph.inputs[0], graph.plan)[: len(positions)]
        errors.append(relative_error(replayed, launched))
    return errors
