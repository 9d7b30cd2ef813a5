"""Measure how much of the answer each layer's attention finds, and choose the critical layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.profile.layer_profile import LayerProfile
from benchmarks.samples import Sample, find_answers
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import ProfileError
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.generation.completion import end_tokens
from qcfuse_rag.generation.sampling_params import SamplingParams
from qcfuse_rag.methods.full import full
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.segments import Prompt, Role
from qcfuse_rag.runtime.attention.scores import attention_weights
from qcfuse_rag.runtime.forward import forward_hidden
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.rows import AttentionParams, RowsPlan
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.backends.memory import MemoryStore


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
        answers = find_answers(span.segment.text, sample.answers)
        positions += [
            span.start + token
            for token, (start, stop) in enumerate(offsets)
            if any(start < end and begin < stop for begin, end in answers)
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


TOO_LONG = "longer than the context window"
NOT_THERE = "the answer does not stand in the passages"
NOT_DECISIVE = "the model's answer rests on no passage"
RECALL_SHARE = 0.1  # share of the passages' tokens with most attention among which the answer counts as found


def profile_layers(
    engine: FusionEngine,
    samples: Sequence[Sample],
    *,
    layers: int = 3,
    depth_penalty: float = 0.0,
    labelled: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> LayerProfile:
    """Measure which layers of a model attend to the answer, as QCFuse (arXiv 2606.05875) does offline.

    The engine gives the model and the wording of the prompt; its store is not used. For the penalty see
    `choose_layers`. If not `labelled`, the evidence is found without the samples' answers, see `decisive_positions`.

    Raises:
        ProfileError: if no sample can be used.
        ValueError: if the model has fewer layers, or the penalty is negative.
    """
    lm = engine.lm
    choose_layers([0.0] * lm.n_layers, layers, depth_penalty)  # refuse bad arguments before the work
    total = torch.zeros(lm.n_layers, dtype=torch.float64)
    skipped: Counter[str] = Counter()
    for done, sample in enumerate(samples, 1):
        recall = _recall(engine, sample, labelled=labelled)
        if isinstance(recall, str):
            skipped[recall] += 1
        else:
            total += recall
        if progress is not None:
            progress(done, len(samples))
    used = len(samples) - skipped.total()
    if not used:
        reasons = "; ".join(f"{count} times {reason}" for reason, count in skipped.items())
        raise ProfileError(f"no question can be used ({reasons or 'there are none'}); give others, or fewer passages")
    mean_recall = tuple((total / used).tolist())
    return LayerProfile(
        model=lm.name,
        fingerprint=lm.fingerprint.fields(),
        layers=choose_layers(mean_recall, layers, depth_penalty),
        recall=mean_recall,
        labels="answers" if labelled else "leave-one-out",
        samples=used,
        skipped=dict(skipped),
        depth_penalty=depth_penalty,
    )


def choose_layers(recall: Sequence[float], count: int, depth_penalty: float = 0.0) -> tuple[int, ...]:
    """Return the layers of highest recall minus a penalty for depth; of equal layers, the earlier.

    Args:
        recall: each layer's recall, 0 to 1.
        count: number of layers to choose.
        depth_penalty: subtracted from a layer's recall after multiplication by the layer's index over the number of
            layers. A probe runs up to its last layer, so shallow layers are cheaper.

    Raises:
        ValueError: if the model has fewer layers, or the penalty is negative.
    """
    if not 1 <= count <= len(recall):
        raise ValueError(f"the model has {len(recall)} layers; choose 1 to {len(recall)} of them, not {count}")
    if depth_penalty < 0:
        raise ValueError(f"the depth penalty must not be negative, got {depth_penalty}")
    penalized = [value - depth_penalty * layer / len(recall) for layer, value in enumerate(recall)]
    best = sorted(range(len(recall)), key=lambda layer: -penalized[layer])
    return tuple(sorted(best[:count]))


def _recall(engine: FusionEngine, sample: Sample, *, labelled: bool) -> Tensor | str:
    """Return a sample's recall by layer, or the reason why the sample cannot be used."""
    prompt = engine.prompt(sample.question, sample.passages)
    if len(prompt) + (0 if labelled else ANSWER_TOKENS) > engine.lm.context_window.tokens:
        return TOO_LONG
    targets = answer_positions(engine.prompts, prompt, sample) if labelled else decisive_positions(engine, sample)
    if not targets:
        return NOT_THERE if labelled else NOT_DECISIVE
    candidates = [position for span in prompt.chunks for position in range(span.start, span.stop)]
    return recall_by_layer(attention_by_layer(engine.lm, prompt), candidates, targets)


@torch.inference_mode()
def attention_by_layer(lm: LanguageModel, prompt: Prompt) -> Tensor:
    """Return the attention of a prompt's question in every layer of a full prefill.

    The asking rows are those of a probe over stored passages, see `FusedPrompt.probe_rows`. Nothing is reused, so this
    is the attention that a probe would measure with perfect caches: `[n_layers, T]` float32 on the CPU, for each
    position the mean over heads and asking rows. The prompt must fit the context window.
    """
    fused = FusedPrompt.empty(ModelRunner(lm, MemoryStore()), prompt, len(prompt))
    for span in prompt.spans:
        if span.segment.role in (Role.SYSTEM_PREFIX, Role.CHUNK):
            fused.known[span.start : span.stop] = True
    asking = fused.probe_rows()
    length = int(asking[-1]) + 1  # no asking row sees a later token
    asking = asking.to(lm.device)
    visible = torch.ones(length, dtype=torch.bool, device=lm.device)
    attention = torch.zeros(lm.n_layers, len(prompt))

    def observe(layer: int, query: Tensor, key: Tensor, params: AttentionParams) -> None:
        weights = attention_weights(query[:, :, asking], key, asking, visible, params)
        attention[layer, :length] = weights.cpu()

    plan = RowsPlan.between(0, length, lm.device, lm.sliding, observe)
    forward_hidden(lm, fused.ids[:length], plan, fused.loading_buffer, depth=lm.n_layers)
    return attention


def recall_by_layer(attention: Tensor, candidates: Sequence[int], targets: Sequence[int]) -> Tensor:
    """Return for each layer the share of the targets among the tenth of the candidates with most attention.

    `attention` is `[n_layers, T]`; `targets` are some of the `candidates`, at least one. The result is `[n_layers]`
    float64, 0 to 1; at most below 1 where the targets are more than a tenth of the candidates.
    """
    positions = torch.tensor(candidates)
    is_target = torch.isin(positions, torch.tensor(targets))
    count = max(1, int(RECALL_SHARE * len(positions)))
    best = attention[:, positions].argsort(dim=1, descending=True, stable=True)[:, :count]
    return is_target[best].sum(1).double() / len(targets)
