"""Tune a writer on a library's passages, and keep it if fused answers come nearer to full prefill's."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import torch
from safetensors import safe_open

from qcfuse_rag.errors import QCFuseError, UnsupportedModel
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.writer import WriterWeights, linear_layers, load_writer, save_writer
from qcfuse_rag.store.key import hash_ids
from qcfuse_rag.tuning.prompts import WINDOW_SHARE, task_prompt, usable_passages
from qcfuse_rag.tuning.trainer import Prompts, Trainer
from qcfuse_rag.verification.exactness import stock_attention

RATIOS = (0.05, 0.15)
LEAST_PASSAGES, HELD_OUT_PROMPTS = 20, 24
WARM_UP_STEPS, TAUGHT_STEPS = 10, 4
MEASUREMENTS, PATIENCE = 8, 3
"""Measurements of a whole tuning, and how many of them without a better one end it."""
LEAST_GAIN = 0.05
"""Share of the divergence that a writer has to take away to be kept."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Schedule:
    """How many prompts a kind of device learns from, in all, in a step and at once, and the highest learning rate."""

    prompts: int
    step: int
    part: int
    rate: float


ON_CPU, ON_GPU = Schedule(120, 4, 2, 5e-4), Schedule(4096, 32, 32, 1e-3)


@dataclass(frozen=True, slots=True)
class Nearness:
    """How near fused answers to held-out prompts are to full prefill's; divergences are means in nats a token."""

    kl: float
    first_kl: float
    same: float


Measured = Mapping[float, Nearness]
"""By the share of tokens that is recomputed."""


@dataclass(frozen=True, slots=True)
class TuningReport:
    """The outcome of a tuning.

    Attributes:
        path: the writer's file; None if nothing was written, because the writer is not better.
        prompts: number of prompts it was trained on.
        passages: number of passages these are made of.
        before: without the writer.
        after: with the best weights.
    """

    path: Path | None
    prompts: int
    passages: int
    seconds: float
    before: Measured
    after: Measured


class Parts:
    """Computes over prompts in parts, whose size it halves where the memory does not suffice."""

    def __init__(self, size: int) -> None:
        self.size = size

    def compute(self, prompts: Prompts, over: Callable[[Prompts], T]) -> list[T]:
        """Return what a function returns for each part."""
        found, start = list[T](), 0
        while start < len(prompts):
            try:
                found.append(over(prompts[start : start + self.size]))
                start += self.size
            except torch.OutOfMemoryError:
                if self.size == 1:
                    raise
                self.size //= 2
        return found


def partial_path(path: Path) -> Path:
    """Return the file with the weights of a tuning that was interrupted."""
    return path.with_name(f"{path.name}.partial")


def refuse_untunable(lm: LanguageModel) -> None:
    """Raise `UnsupportedModel` if no writer can be trained for a model."""
    window = lm.context_window.tokens
    reasons = {
        f"its weights are {lm.weight_format}; load it with weights='model'": lm.weight_format != "model",
        lm.needs_torch_steps: lm.needs_torch_steps,
        "some layers have no keys and values of their own": lm.n_sharing or len(lm.attention_layers) < lm.n_layers,
        "some layers attend in a window": any(sliding and sliding < window for sliding in lm.sliding),
        "its decoder has no plain linear layers": not linear_layers(lm.model),
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise UnsupportedModel(f"{lm.name} cannot be tuned: {reason}")


def tune(
    lm: LanguageModel,
    prompts: PromptBuilder,
    texts: Sequence[str],
    folder: Path,
    *,
    count: int | None = None,
    seed: int = 1,
    progress: Callable[[int, int], None] = lambda *_: None,
    measured: Callable[[int, Measured], None] = lambda *_: None,
) -> TuningReport:
    """Train a writer on tasks about passages; write it to a store's folder if it is better on other such tasks.

    Ctrl-C keeps the weights so far beside the writer's file; the next call goes on from there.

    Args:
        lm: the model; a writer that it has is left out.
        prompts: its prompts.
        texts: the passages.
        folder: of the store.
        count: prompts to train on; None takes those of `ON_GPU` or `ON_CPU`.
        seed: of the prompts and the first weights.
        progress: called with the number of prompts so far, and of all.
        measured: called with the number of prompts so far, 0 for the untuned model, and what was measured.

    Raises:
        UnsupportedModel: if the model cannot be trained.
        QCFuseError: if there are too few passages.
    """
    lm = lm.with_writer(None)
    refuse_untunable(lm)
    pool = sorted(usable_passages(prompts, texts, lm.context_window.tokens))
    if len(pool) < LEAST_PASSAGES:
        raise QCFuseError(
            f"tuning needs {LEAST_PASSAGES} different passages, and {len(pool)} of {len(texts)} can be used: each may "
            f"have {lm.context_window.tokens // WINDOW_SHARE:,} tokens, an eighth of the context window; warm more "
            "documents"
        )
    schedule = ON_GPU if lm.device.type == "cuda" else ON_CPU
    count, step = count or schedule.prompts, schedule.step
    tuned = {hash_ids(prompts.chunk_ids(text)) for text in pool}
    chance, path = random.Random(seed), lm.fingerprint.writer_path(folder)
    held_out = [task_prompt(prompts, pool, chance) for _ in range(HELD_OUT_PROMPTS)]
    started = time.monotonic()
    with stock_attention(lm):  # without cuDNN's attention, which plans anew for each shape
        trainer = Trainer(lm, prompts)
        teaching, training = Parts(TAUGHT_STEPS * schedule.part), Parts(schedule.part)
        progress(0, count)
        teaching.compute(held_out, trainer.teach)

        def measure(writer: WriterWeights) -> Measured:
            parts = training.compute(held_out, lambda part: trainer.measure(part, RATIOS, writer))
            rows = [[row for part in parts for row in part[at]] for at in range(len(RATIOS))]
            return {
                ratio: Nearness(*map(fmean, zip(*each, strict=True))) for ratio, each in zip(RATIOS, rows, strict=True)
            }

        writer = trainer.new_writer(seed)
        weights = [weight for pair in writer.values() for weight in pair]
        best = before = measure(writer)
        measured(0, before)
        begun = done = min(_take_up(partial_path(path), trainer, writer), count - 1)
        chance.seed(f"{seed} {begun}")
        optimizer, kept, worse, waiting = torch.optim.AdamW(weights), None, 0, list[Prompts]()
        try:
            while done < count and worse < PATIENCE:
                if not waiting:  # padded to equal lengths, so of similar ones
                    some = [task_prompt(prompts, pool, chance) for _ in range(TAUGHT_STEPS * step)]
                    some.sort(key=len)
                    teaching.compute(some, trainer.teach)
                    waiting = [some[start : start + step] for start in range(0, len(some), step)]
                    chance.shuffle(waiting)
                batch, last = waiting.pop()[: count - done], done
                done += len(batch)
                _accumulate(trainer, training, batch, chance, writer)
                torch.nn.utils.clip_grad_norm_(weights, 1.0)
                warm = min(1.0, (done - begun) / (WARM_UP_STEPS * step))
                optimizer.param_groups[0]["lr"] = schedule.rate * warm * (1 - last / count)
                optimizer.step()
                optimizer.zero_grad()
                progress(done, count)
                if done * MEASUREMENTS // count > last * MEASUREMENTS // count:
                    found = measure(writer)
                    measured(done, found)
                    worse += 1
                    if found[RATIOS[0]].kl < best[RATIOS[0]].kl:
                        best, worse = found, 0
                        kept = _copy(writer)
        except KeyboardInterrupt:
            if done > begun:
                save_writer(partial_path(path), writer, tuned, {"prompts": str(done)})
            raise
    written = None
    if kept is not None and best[RATIOS[0]].kl <= (1 - LEAST_GAIN) * before[RATIOS[0]].kl:
        save_writer(path, kept, tuned, {"prompts": str(done)})
        written = path
    partial_path(path).unlink(missing_ok=True)
    return TuningReport(written, done, len(pool), time.monotonic() - started, before, best)


def _accumulate(
    trainer: Trainer, training: Parts, batch: Prompts, chance: random.Random, writer: WriterWeights
) -> None:
    """Fill in the gradients of a step, of which each part counts by its prompts."""
    weights = [weight for pair in writer.values() for weight in pair]
    ratios = {id(prompt): chance.choice(RATIOS) for prompt in batch}

    def add(part: Prompts) -> None:
        loss = trainer.loss(part, [ratios[id(prompt)] for prompt in part], writer) * (len(part) / len(batch))
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = gradient if weight.grad is None else weight.grad + gradient

    training.compute(batch, add)


def _copy(writer: WriterWeights) -> WriterWeights:
    return {name: (down.detach().clone(), up.detach().clone()) for name, (down, up) in writer.items()}


def _take_up(partial: Path, trainer: Trainer, writer: WriterWeights) -> int:
    """Fill in the weights of an interrupted tuning, and return the number of its prompts; 0 if there is none."""
    if not partial.exists():
        return 0
    weights, *_ = load_writer(partial, trainer.model)
    for name, pair in weights.items():
        for weight, half in zip(writer[name], pair, strict=True):
            weight.data.copy_(half)
    with safe_open(partial, "pt") as file:
        return int(file.metadata()["prompts"])
