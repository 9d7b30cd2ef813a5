"""The proxy for labels: which passage the model's own answer rests on, found by leaving out one at a time."""

from __future__ import annotations

import torch

from qcfuse_rag.engine import FusionEngine
from qcfuse_rag.generate.answer import end_tokens
from qcfuse_rag.generate.sampling import SamplingParams
from qcfuse_rag.methods.full import full
from qcfuse_rag.model.language_model import LanguageModel
from qcfuse_rag.profile.samples import Sample

ANSWER_TOKENS = 16


def decisive_positions(engine: FusionEngine, sample: Sample) -> tuple[int, ...]:
    """Return the positions of the passage without which the model would least give its own answer.

    The model answers from all passages, greedily and by full prefill. Then each passage is left out in turn, and the
    one whose absence lowers the log probability of that answer most is taken for the evidence: no label is needed, and
    an answer in words that no passage has is as good as a quotation. It is coarser than a label, a passage instead of
    the answer's tokens, and costs a prefill for every passage.

    Args:
        engine: with the model; its store is not used.
        sample: a question over two or more passages.

    Returns:
        Positions in the prompt of the sample's question and passages; none if there are fewer than two passages, the
        model answers nothing, or no passage makes its answer likelier.
    """
    prompt = engine.prompt(sample.question, sample.passages)
    if len(prompt.chunks) < 2:
        return ()
    answer = engine.generate(prompt, SamplingParams(max_new_tokens=ANSWER_TOKENS), method=full()).ids
    if all(token in end_tokens(engine.lm) for token in answer):
        return ()
    whole = answer_log_probability(engine.lm, prompt.ids, answer)
    texts = [text for text in sample.passages if engine.prompts.chunk_ids(text)]
    lost = []
    for index in range(len(texts)):
        without = engine.prompt(sample.question, texts[:index] + texts[index + 1 :])
        lost.append(whole - answer_log_probability(engine.lm, without.ids, answer))
    decisive = max(range(len(texts)), key=lost.__getitem__)
    if lost[decisive] <= 0:
        return ()
    span = prompt.chunks[decisive]
    return tuple(range(span.start, span.stop))


@torch.inference_mode()
def answer_log_probability(lm: LanguageModel, ids: tuple[int, ...], answer: tuple[int, ...]) -> float:
    """Return the natural log probability of an answer's tokens after a prompt's, by the model's own forward."""
    sequence = torch.tensor([ids + answer], device=lm.device)
    logits = lm.model(input_ids=sequence, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1]
    chosen = logits.float().log_softmax(-1).gather(1, sequence[0, len(ids) :, None])
    return float(chosen.sum())
