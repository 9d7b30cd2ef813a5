"""The greedy answer over a prefilled prompt, and the logits along a given answer (teacher forcing).

Teacher forcing feeds a cache the tokens of a fixed answer and reads its prediction before each of them. Two caches that
predict along the same answer can so be compared at every token, not only at the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.generation.stop_criteria import end_tokens
from qcfuse_rag.runtime.forward import forward_logits
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.runtime.runner import ModelRunner


@torch.inference_mode()
def greedy_answer(runner: ModelRunner, prefilled: Prefilled, max_new_tokens: int) -> tuple[tuple[int, ...], Tensor]:
    """Decode the greedy answer of a prefilled prompt token by token.

    The rows of the answer are written to the buffer after the prompt. That is harmless to later answers over the same
    buffer: every pass computes these positions again before it reads them.

    Args:
        runner: computes the decode steps.
        prefilled: the prompt, with capacity for all answer tokens but the last.
        max_new_tokens: limit of the answer, at least 1.

    Returns:
        The `N` token ids up to and including the end token, and the `[N, vocabulary]` float32 logits before each.

    Raises:
        ValueError: if the limit is below 1 or the buffer is too small for it.
    """
    return greedy_answers(runner, [prefilled], max_new_tokens)[0]


@torch.inference_mode()
def greedy_answers(
    runner: ModelRunner, prompts: Sequence[Prefilled], max_new_tokens: int
) -> list[tuple[tuple[int, ...], Tensor]]:
    """Decode the greedy answers of several prefilled prompts together; see `greedy_answer`.

    A step reads the weights once for all of them.
    """
    if max_new_tokens < 1:
        raise ValueError(f"an answer must have at least 1 token, got {max_new_tokens}")
    for prefilled in prompts:
        _check_capacity(prefilled, max_new_tokens)
    ends = end_tokens(runner.lm)
    answers = [[int(prefilled.logits.argmax())] for prefilled in prompts]
    logits = [[prefilled.logits] for prefilled in prompts]
    while unfinished := [i for i, ids in enumerate(answers) if ids[-1] not in ends and len(ids) < max_new_tokens]:
        tokens = [answers[i][-1] for i in unfinished]
        positions = [len(prompts[i].prompt) + len(answers[i]) - 1 for i in unfinished]
        buffers = [prompts[i].buffer for i in unfinished]
        for i, after in zip(unfinished, runner.decodes(tokens, positions, buffers), strict=True):
            logits[i].append(after)
            answers[i].append(int(after.argmax()))
    return [(tuple(ids), torch.stack(rows)) for ids, rows in zip(answers, logits, strict=True)]


@torch.inference_mode()
def answer_logits(runner: ModelRunner, prefilled: Prefilled, ids: Sequence[int]) -> Tensor:
    """Compute the logits before each token of a given answer in one pass over a prefilled prompt.

    The pass sums in another order than decode steps do, so the results are equal within the rounding of the dtype.

    Args:
        runner: the model.
        prefilled: the prompt, with capacity for all answer tokens but the last.
        ids: the `N` tokens of the answer.

    Returns:
        `[N, vocabulary]` float32 logits; the first row is `prefilled.logits`.

    Raises:
        ValueError: if the buffer is too small for the answer.
    """
    if len(ids) < 2:
        return prefilled.logits[None][: len(ids)]
    _check_capacity(prefilled, len(ids))
    lm, length = runner.lm, len(prefilled.prompt)
    plan = RowsPlan.between(length, length + len(ids) - 1, lm.device, lm.sliding)
    following = forward_logits(lm, torch.tensor(ids[:-1], device=lm.device), plan, prefilled.buffer)
    return torch.cat([prefilled.logits[None], following])


def _check_capacity(prefilled: Prefilled, answer_tokens: int) -> None:
    needed, capacity = len(prefilled.prompt) + answer_tokens - 1, prefilled.buffer.capacity
    if capacity < needed:
        raise ValueError(f"prompt and answer need {needed} positions, the buffer has {capacity}; reserve more")
