"""Labels: which tokens of a prompt are the answer, by an answer that is known."""

from __future__ import annotations

from qcfuse_rag.profile.occurrences import find_answers
from qcfuse_rag.profile.samples import Sample
from qcfuse_rag.prompt.builder import PromptBuilder
from qcfuse_rag.prompt.segments import Prompt


def answer_positions(prompts: PromptBuilder, prompt: Prompt, sample: Sample) -> tuple[int, ...]:
    """Return the positions of the tokens that the sample's answers are made of, ascending.

    Every occurrence counts, in the passages that are needed if those are known, else in all. A token counts if any of
    its characters does, so a space or a full stop that the tokenizer ties to the answer counts with it.

    Args:
        prompts: what built the prompt.
        prompt: of the sample's question and passages.
        sample: the sample.

    Returns:
        Positions in the prompt; none if no answer stands in the passages.
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
        found = find_answers(span.segment.text, sample.answers)
        positions += [
            span.start + token
            for token, (start, stop) in enumerate(offsets)
            if any(start < last and first < stop for first, last in found)
        ]
    return tuple(positions)
