"""Measure how much of the answer each layer's attention finds, and choose the critical layers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
from torch import Tensor
from typer import Option

from benchmarks.options import ModelOptions
from benchmarks.questions import Example, demo_examples, find_answers, read_dataset
from benchmarks.runner import Report, Run, Table, about_model, machine_conditions
from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.methods.qcfuse import FORMAT, layers_by_depth
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.segments import Prompt, Role
from qcfuse_rag.runtime.attention.scores import attention_weights
from qcfuse_rag.runtime.forward import forward_hidden
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.rows import AttentionParams, RowsPlan
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.backends.memory import MemoryStore


def answer_positions(prompts: PromptBuilder, prompt: Prompt, sample: Example) -> tuple[int, ...]:
    """Return the positions of the tokens in the sample's answers, ascending; none if no passage has an answer.

    Every occurrence in the needed passages counts, else in all; a token counts if any of its characters does.
    """
    positions: list[int] = []
    spans = iter(prompt.chunks)
    for index, passage in enumerate(sample.passages):
        _, offsets = prompts.tokens.encode(prompts.template.format_chunk(passage))
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


DEMO_DISTRACTORS, BAR = 3, 24
TOO_LONG = "longer than the context window"
NOT_THERE = "the answer does not stand in the passages"
RECALL_SHARE = 0.1  # share of the passages' tokens with most attention among which the answer counts as found


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Options of the measurement."""

    data: Annotated[
        Path | None,
        Option(
            help="JSON lines file of questions, in the format of `quality --data-dir`; by default the demonstration's."
        ),
    ] = None
    size: Annotated[int | None, Option(min=1, help="Number of questions to use; all by default.")] = None
    layers: Annotated[int, Option(min=1, help="Number of layers to choose.")] = 3
    distractors: Annotated[
        int | None, Option(min=0, help="Passages beside the needed passages; all of a file by default.")
    ] = None
    out: Annotated[
        Path | None, Option(help="File of the profile; `profile.json` in a store's folder is read by methods.")
    ] = None

    def samples(self) -> list[Example]:
        """Return the selected questions, with the selected number of distractor passages."""
        if self.data is None:
            distractors = DEMO_DISTRACTORS if self.distractors is None else self.distractors
            return demo_examples(distractors)[: self.size]
        samples = read_dataset(self.data, size=self.size)
        if self.distractors is None:
            return samples
        return [sample.with_distractors(self.distractors) for sample in samples]


def measure(options: Options, run: Run) -> None:
    """Measure which layers of a model attend to the answer, as QCFuse (arXiv 2606.05875) does offline."""
    with options.load_engine(MemoryStore()) as engine:
        profile_layers(engine, options.samples(), options, run)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(options.out, json.dumps(layer_profile(run), indent=1))


def profile_layers(engine: FusionEngine, samples: Sequence[Example], options: Options, run: Run) -> None:
    """Add the recall of each layer for each question, or the reason why it cannot be used.

    A `QCFuseError` says that no question can be used, a `ValueError` that the model has fewer layers than asked for.
    """
    lm = engine.lm
    choose_layers([0.0] * lm.n_layers, options.layers)  # refuse bad arguments before the work
    chosen = {name: getattr(options, name) for name in ("data", "distractors", "layers")}
    conditions = {**machine_conditions(lm), **chosen}
    run.begin({**about_model(lm), "name": lm.name, "fingerprint": lm.fingerprint.fields()}, conditions)
    for number, sample in enumerate(samples):
        if (number,) not in run.records:
            recall = _recall(engine, sample)
            run.add((number,), {"skipped": recall} if isinstance(recall, str) else {"recall": recall.tolist()})
        run.progress(number + 1, len(samples))
    layer_profile(run)


def choose_layers(recall: Sequence[float], count: int) -> tuple[int, ...]:
    """Return the layers of highest recall; of equal layers, the earlier."""
    if not 1 <= count <= len(recall):
        raise ValueError(f"the model has {len(recall)} layers; choose 1 to {len(recall)} of them, not {count}")
    best = sorted(range(len(recall)), key=lambda layer: -recall[layer])
    return tuple(sorted(best[:count]))


def layer_profile(run: Run) -> dict[str, Any]:
    """Return the profile that the records so far make, as `profile.json` holds it."""
    recalls = [record["recall"] for record in run.records.values() if "recall" in record]
    skipped = Counter(record["skipped"] for record in run.records.values() if "skipped" in record)
    if not recalls:
        reasons = "; ".join(f"{count} times {reason}" for reason, count in skipped.items())
        raise QCFuseError(f"no question can be used ({reasons or 'there are none'}); give others, or fewer passages")
    recall = torch.tensor(recalls, dtype=torch.float64).mean(0).tolist()
    return {
        "format": FORMAT,
        "model": run.about["name"],
        "fingerprint": run.about["fingerprint"],
        "layers": list(choose_layers(recall, run.conditions["layers"])),
        "recall": recall,
        "labels": "answers",
        "samples": len(recalls),
        "skipped": dict(skipped),
    }


def report(run: Run) -> Report:
    """Return the recall of each layer; a star marks chosen layers, a dot the default layers by depth."""
    if not any("recall" in record for record in run.records.values()):
        return Report({}, [])
    profile = layer_profile(run)
    recall, chosen = profile["recall"], profile["layers"]
    by_depth, highest = layers_by_depth(len(recall)), max(recall) or 1.0
    rows = [
        [
            str(layer),
            f"{value:.3f}",
            ("*" if layer in chosen else "") + ("·" if layer in by_depth else ""),
            "█" * round(BAR * value / highest),
        ]
        for layer, value in enumerate(recall)
    ]
    title = f"Recall@10 % of the answers, {profile['samples']} questions"
    notes = [
        f"{mark}: {', '.join(map(str, layers))}; mean recall {mean(recall[layer] for layer in layers):.3f}"
        for mark, layers in (("* chosen", chosen), ("· by depth", by_depth))
    ]
    notes += [f"{count} questions skipped: {reason}" for reason, count in profile["skipped"].items()]
    return Report(profile, [Table(title, ("layer", "recall", "", " "), rows)], notes)


def _recall(engine: FusionEngine, sample: Example) -> Tensor | str:
    """Return a sample's recall by layer, or the reason why the sample cannot be used."""
    prompt = engine.prompt(sample.question, sample.passages)
    if len(prompt) > engine.lm.context_window.tokens:
        return TOO_LONG
    targets = answer_positions(engine.prompts, prompt, sample)
    if not targets:
        return NOT_THERE
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
