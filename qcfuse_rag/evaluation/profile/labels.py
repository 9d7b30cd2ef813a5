"""Labels for a profile: the tokens of a prompt that hold the answer, with and without a known answer."""

from __future__ import annotations

import torch

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.generation.sampling import SamplingParams
from qcfuse_rag.generation.stop_criteria import end_tokens
from qcfuse_rag.methods.full import full
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.verification.samples import Sample, find_answers


def answer_positions(prompts: PromptBuilder, prompt: Prompt, sample: Sample) -> tuple[int, ...]:
    """Return the positions of the tokens in the sample's answers, ascending; none if no passage has an answer.

    Every occurrence in the needed passages counts; if they are not known, in all passages. A token counts if any of its
    characters does, such as a space or a full stop that the tokenizer joins to the answer.
    """
    positions: list[int] = []
    spans = iter(prompt.chunks)
    for index, passage in enumerate(sample.passages):
        offsets = prompts.chunk_offsets(passage)
        if not offsets:
            continue  # a passage without tokens is no segment of the prompt
        span = next(spans)
        if sample.supporting and index not in sample.supporting:
            continue
        ranges = find_answers(span.segment.text, sample.answers)
        positions += [
            span.start + token
            for token, (start, stop) in enumerate(offsets)
            if any(start < last and first < stop for first, last in ranges)
        ]
    return tuple(positions)


ANSWER_TOKENS = 16


def decisive_positions(engine: FusionEngine, sample: Sample) -> tuple[int, ...]:
    """Return the positions of the passage that the model's own answer depends on most, or none.

    The model answers from all passages, greedily and by full prefill. Then each passage is left out in turn. The
    passage whose absence lowers the log probability of that answer most is the evidence. This needs no label, and works
    for an answer that no passage quotes. It is coarser than a label, a passage instead of the answer's tokens, and
    costs a prefill for every passage. There is none if there are fewer than two passages, the model answers nothing, or
    no passage makes its answer likelier.
    """
    prompt = engine.prompt(sample.question, sample.passages)
    if len(prompt.chunks) < 2:
        return ()
    answer = engine.generate(prompt, SamplingParams(max_new_tokens=ANSWER_TOKENS), method=full()).ids
    if all(token in end_tokens(engine.lm) for token in answer):
        return ()
    log_probability = answer_log_probability(engine.lm, prompt.ids, answer)
    texts = [text for text in sample.passages if engine.prompts.chunk_ids(text)]
    lost = []
    for index in range(len(texts)):
        without = engine.prompt(sample.question, texts[:index] + texts[index + 1 :])
        lost.append(log_probability - answer_log_probability(engine.lm, without.ids, answer))
    decisive = max(range(len(texts)), key=lost.__getitem__)
    if lost[decisive] <= 0:
        return ()
    span = prompt.chunks[decisive]
    return tuple(range(span.start, span.stop))


@torch.inference_mode()
def answer_log_probability(lm: LanguageModel, ids: tuple[int, ...], answer: tuple[int, ...]) -> float:
    """Return the natural log probability of an answer after a prompt, by the model's own forward pass."""
    sequence = torch.tensor([ids + answer], device=lm.device)
    logits = lm.model(input_ids=sequence, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1]
    chosen = logits.float().log_softmax(-1).gather(1, sequence[0, len(ids) :, None])
    return float(chosen.sum())
