"""BatchLLM's batch known as a whole (arXiv 2412.03594): sharers run one after the other, what they share is done once.

Prompts are put in the order of their segments, like words in a dictionary. Prompts that begin alike are then
neighbours, every beginning is loaded or computed by the first that has it, and one beginning at a time is held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import prefill, require_room
from qcfuse_rag.fusion.shared_prefix import SharedPrefix
from qcfuse_rag.generation.decode import Generation, Step, TextStream
from qcfuse_rag.generation.sampling import SamplingParams
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.graphs.prefill_graphs import PrefillRunner
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.loading.loading import Loading
from qcfuse_rag.store.backends.base import KVStore


def answer_many(
    lm: LanguageModel,
    store: KVStore,
    prompts: Sequence[Prompt],
    method: Method,
    params: SamplingParams,
    *,
    progress: Callable[[int, int], None] | None = None,
    loading: Loading | None = None,
    passes: PrefillRunner | None = None,
    step: Step | None = None,
) -> list[Generation]:
    """Answer prompts as if one by one, sharing the work for what they begin with.

    What is stored is fused whatever the method's guard would say: prompts share what is placed, not what is exact.
    Full prefill shares exact keys and values, methods over stored caches the loading and placing of chunks; what a
    method recomputes depends on the question and is each prompt's own. Reports say what was done for each prompt: rows
    that another computed are reused ones, bytes that another loaded are not counted.

    Args:
        lm: the model.
        store: where chunks may be found.
        prompts: in any order.
        method: what to reuse and what to recompute.
        params: how to choose tokens.
        progress: called with answers `(done, total)` after each.
        loading: how to go on loading while computing, and how long to wait; see `fusion.pipeline.prefill`.
        passes: of the model, recorded ones perhaps.
        step: computes the next token's row; launched kernel by kernel if None.

    Returns:
        An answer for each prompt, in the order of the prompts.

    Raises:
        PromptTooLong: if any prompt and its answer exceed the context window; then none was answered.
    """
    for prompt in prompts:
        require_room(lm, prompt, params.max_new_tokens)
    order = sharing_order(prompts)
    answers: dict[int, Generation] = {}
    shared = SharedPrefix()
    for place, index in enumerate(order):
        prompt = prompts[index]
        shared.keep = sum(shared_tokens(prompt, prompts[following]) for following in order[place + 1 : place + 2])
        store.advance()
        room = params.max_new_tokens
        prefilled = prefill(lm, store, prompt, method, room=room, shared=shared, loading=loading, passes=passes)
        answers[index] = TextStream(lm, prefilled, params, step=step).result()
        if progress is not None:
            progress(len(answers), len(prompts))
    return [answers[index] for index in range(len(prompts))]


def sharing_order(prompts: Sequence[Prompt]) -> list[int]:
    """Return the indices of prompts in an order in which those that begin with the same segments are neighbours."""
    return sorted(range(len(prompts)), key=lambda i: (prompts[i].prefix_ids, [s.ids for s in prompts[i].segments], i))


def shared_tokens(one: Prompt, other: Prompt) -> int:
    """Return how many tokens of leading segments two prompts have in common, their last segments left out."""
    count = 0
    if one.prefix_ids == other.prefix_ids:
        for mine, yours in zip(one.segments[:-1], other.segments[:-1], strict=False):
            if (mine.role, mine.ids) != (yours.role, yours.ids):
                break
            count += len(mine.ids)
    return count
