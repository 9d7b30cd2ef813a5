"""Answer a batch of prompts and share the work for common prefixes (BatchLLM, arXiv 2412.03594).

Prompts are sorted by their segments, like words in a dictionary, so that prompts with a common prefix are neighbours.
The first of them loads or computes the prefix, and the others reuse it. One prefix is held at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import check_window, prefill
from qcfuse_rag.fusion.shared_prefix import SharedPrefix
from qcfuse_rag.generation.decode import Generation, TextStream
from qcfuse_rag.generation.sampling import SamplingParams
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.runner import ModelRunner


def answer_many(
    runner: ModelRunner,
    prompts: Sequence[Prompt],
    params: SamplingParams | None = None,
    *,
    method: Method,
    progress: Callable[[int, int], None] | None = None,
) -> list[Generation]:
    """Answer each prompt as if alone, but load or compute common prefixes once.

    The method's guard is ignored, and stored chunks are always fused, because prompts share placed chunks, not exact
    ones. Full prefill shares exact keys and values. Methods over stored caches share the loading and placing of chunks;
    the recomputed rows depend on the question, so every prompt computes its own. In a prompt's report, rows that
    another prompt computed count as reused, and bytes that another prompt loaded do not count.

    Args:
        runner: the model and the store.
        prompts: in any order.
        params: sampling settings; greedy by default.
        method: decides what to reuse and what to recompute.
        progress: called with `(done, total)` after each answer.

    Returns:
        The answers, in the order of the prompts.

    Raises:
        PromptTooLong: if any prompt and its answer exceed the context window; then no prompt is answered.
    """
    params = params or SamplingParams()
    for prompt in prompts:
        check_window(runner.lm, prompt, params.max_new_tokens)
    order = sharing_order(prompts)
    unguarded = method.unguarded
    answers: dict[int, Generation] = {}
    shared = SharedPrefix()
    for index, next_index in zip_longest(order, order[1:]):
        prompt = prompts[index]
        shared.keep = 0 if next_index is None else shared_tokens(prompt, prompts[next_index])
        runner.store.advance()
        prefilled = prefill(runner, prompt, unguarded, answer_tokens=params.max_new_tokens, shared=shared)
        answers[index] = TextStream(runner, prefilled, params).result()
        if progress is not None:
            progress(len(answers), len(prompts))
    return [answers[index] for index in range(len(prompts))]


def sharing_order(prompts: Sequence[Prompt]) -> list[int]:
    """Return the indices of prompts, sorted so that prompts with the same leading segments are neighbours."""
    return sorted(range(len(prompts)), key=lambda i: (prompts[i].prefix_ids, [s.ids for s in prompts[i].segments], i))


def shared_tokens(first: Prompt, second: Prompt) -> int:
    """Count the tokens of the leading segments that two prompts share; their last segments do not count."""
    count = 0
    if first.prefix_ids == second.prefix_ids:
        for left, right in zip(first.segments[:-1], second.segments[:-1], strict=False):
            if (left.role, left.ids) != (right.role, right.ids):
                break
            count += len(left.ids)
    return count
