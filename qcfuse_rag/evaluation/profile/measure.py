"""Profile a model: question by question, how much of the answer each layer finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import ProfileError
from qcfuse_rag.evaluation.profile.labels import ANSWER_TOKENS, answer_positions, decisive_positions
from qcfuse_rag.evaluation.profile.recall import attention_by_layer, recall_by_layer
from qcfuse_rag.runtime.layer_profile import LayerProfile, choose_layers
from qcfuse_rag.verification.samples import Sample

TOO_LONG = "longer than the context window"
NOT_THERE = "the answer does not stand in the passages"
NOT_DECISIVE = "the model's answer rests on no passage"


def profile_layers(
    engine: FusionEngine,
    samples: Sequence[Sample],
    *,
    layers: int = 3,
    depth_penalty: float = 0.0,
    labelled: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> LayerProfile:
    """Measure which layers of a model look at the answer, as QCFuse (arXiv 2606.05875) does offline.

    Args:
        engine: with the model and the wording of the prompt; its store is not used.
        samples: questions over passages.
        layers: how many to choose.
        depth_penalty: see `choose_layers`.
        labelled: use the answers the samples give; False finds the evidence without them, see `evaluation.profile.labels`.
        progress: called with questions `(done, total)`.

    Raises:
        ProfileError: if no sample can be used.
        ValueError: if the model has not as many layers, or the penalty is negative.
    """
    lm = engine.lm
    choose_layers([0.0] * lm.n_layers, layers, depth_penalty)  # complains before the work, not after
    total = torch.zeros(lm.n_layers, dtype=torch.float64)
    skipped: Counter[str] = Counter()
    for done, sample in enumerate(samples, 1):
        prompt = engine.prompt(sample.question, sample.passages)
        if len(prompt) + (0 if labelled else ANSWER_TOKENS) > lm.window.tokens:
            skipped[TOO_LONG] += 1
        else:
            found = answer_positions(engine.prompts, prompt, sample) if labelled else decisive_positions(engine, sample)
            if found:
                candidates = [position for span in prompt.chunks for position in range(span.start, span.stop)]
                total += recall_by_layer(attention_by_layer(lm, prompt), candidates, found)
            else:
                skipped[NOT_THERE if labelled else NOT_DECISIVE] += 1
        if progress is not None:
            progress(done, len(samples))
    used = len(samples) - skipped.total()
    if not used:
        why = "; ".join(f"{count} times {reason}" for reason, count in skipped.items())
        raise ProfileError(f"no question can be used ({why or 'there are none'}); give others, or fewer passages")
    recall = tuple((total / used).tolist())
    return LayerProfile(
        model=lm.name,
        fingerprint=lm.fingerprint.fields(),
        layers=choose_layers(recall, layers, depth_penalty),
        recall=recall,
        labels="answers" if labelled else "leave-one-out",
        samples=used,
        skipped=dict(skipped),
        depth_penalty=depth_penalty,
    )
