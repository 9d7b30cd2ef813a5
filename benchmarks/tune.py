"""Train low-rank adapters that bring fused prompts nearer to full prefill, and measure what they win on held-out text.

A *reader* is on for the rows that a fused prompt computes, a *writer* while passages are computed for the store. The
teacher is the same model's full prefill along its own greedy answer; the loss is the KL divergence on the rows of
question and answer. The idea is that of ATTuner (arXiv 2609.36722), for readers on `W_Q`, and of SemPIC (2607.28069),
for writers. Caches are those of `auto`: primed, the first passage exact, rows by the question's attention.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin
from typer import Option

from benchmarks.configurations import split_names
from benchmarks.floors import stock_model
from benchmarks.options import ModelOptions, shares
from benchmarks.questions import Example, read_dataset
from benchmarks.runner import Report, Run, Table, about_model, machine_conditions
from benchmarks.tuning_prompts import TuningPrompt, task_prompt, training_prompts
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.generation.completion import end_tokens
from qcfuse_rag.ingestion.primer import PRIMER, primer_ids
from qcfuse_rag.models.rope import cache_argument
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.memory import MemoryStore

RANK = 8
SCALE = 2.0
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
VARIANTS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "reader_q": (("q_proj",), ()),
    "reader_all": (EVERY, ()),
    "writer": ((), ATTENTION),
    "both": (EVERY, EVERY),
}
"""Modules of the reader and of the writer."""

KV = list[tuple[Tensor, Tensor]]
Weights = dict[str, tuple[nn.Parameter, nn.Parameter]]


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Options of the training."""

    data_dir: Annotated[Path, Option(help="Folder of the datasets, see `quality --help`.")] = Path(".")
    train: Annotated[str, Option(help="Datasets to train on, with commas.")] = ""
    held_out: Annotated[str, Option(help="Datasets to measure on, with commas.")] = ""
    first: Annotated[int, Option(min=0, help="First held-out question of each dataset.")] = 0
    size: Annotated[int, Option(min=1, help="Held-out questions of each dataset, and half as many tasks.")] = 50
    variants: Annotated[str, Option(help=f"Adapters, with commas: {', '.join(VARIANTS)}.")] = "reader_q,reader_all,both"
    rates: Annotated[str, Option(help="Learning rate of each adapter, with commas.")] = "1e-4,5e-5,7e-5"
    measured: Annotated[
        str, Option(help="Numbers of prompts after which to measure; the last ends it, 0 trains nothing.")
    ] = "250,500"
    ratios: Annotated[str, Option(help="Shares to recompute, with commas.")] = "0,.05,.15"
    batch: Annotated[int, Option(min=1, help="New prompts of a step.")] = 4
    replayed: Annotated[int, Option(min=0, help="Earlier prompts of a step; not for writers.")] = 0
    answer_tokens: Annotated[int, Option(min=1, help="Most tokens of an answer.")] = 24
    adapters: Annotated[Path | None, Option(help="Folder for the adapters, in which a later run finds them.")] = None
    seed: Annotated[int, Option(help="Seed of prompts and adapters.")] = 1


class AdaptedLinear(nn.Module):
    """A linear layer that adds the product of an adapter while one is switched on."""

    def __init__(self, linear: nn.Linear, name: str, switch: list[Weights]) -> None:
        super().__init__()
        self.linear, self.name, self.switch = linear, name, switch

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `[..., out]` for `[..., in]`."""
        output: Tensor = self.linear(hidden)
        if (pair := self.switch[-1].get(self.name)) is None:
            return output
        down, up = (weights.to(hidden.dtype) for weights in pair)
        return output + SCALE * F.linear(F.linear(hidden, down), up)


class BehindLayer(CacheLayerMixin):  # type: ignore[misc]
    """A cache layer of fixed keys and values in front of a pass, which keeps the fresh ones."""

    is_sliding = False

    def __init__(self, fixed: tuple[Tensor, Tensor] | None) -> None:
        super().__init__()
        self.fixed, self.is_initialized = fixed, True

    def lazy_initialization(self, *args: Any) -> None:
        """Nothing is to be allocated."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return `[B, Hkv, P + R, D]` keys and values, the fixed ones first."""
        self.fresh = key_states, value_states
        if self.fixed is None:
            return self.fresh
        keys, values = (each.expand(len(key_states), -1, -1, -1) for each in self.fixed)
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        """Masks are given, not made."""
        return 0, 0

    def get_seq_length(self) -> int:
        """Positions are given, not counted."""
        return 0

    def get_max_cache_shape(self) -> int:
        """There is no limit."""
        return -1

    def get_max_length(self) -> int:
        """There is no limit."""
        return -1


class Trainer:
    """A model with adapters, and passes over fused prompts through which gradients flow."""

    def __init__(self, lm: LanguageModel, prefix: Sequence[int], primer: Sequence[int]) -> None:
        self.model = stock_model(lm)  # gradients do not flow through packed weights
        self.model.set_attn_implementation(lm.stock_attention)
        self.lm, self.prefix_tokens, self.switch = lm, len(prefix), [Weights()]
        self.linears = dict[str, tuple[int, int]]()
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        for name, module in list(self.model.get_decoder().named_modules()):
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] in EVERY:
                self.linears[name] = module.in_features, module.out_features
                parent, _, child = name.rpartition(".")
                setattr(self.model.get_decoder().get_submodule(parent), child, AdaptedLinear(module, name, self.switch))
        self.front: KV = []
        with torch.no_grad():
            ids = torch.tensor([[*prefix, *primer]])
            causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            self.front = self.run(ids, torch.arange(ids.shape[1])[None], None, causal)[1]
        self.front_tokens = ids.shape[1]

    @contextmanager
    def using(self, adapter: Weights) -> Iterator[None]:
        """Switch an adapter on."""
        self.switch.append(adapter)
        try:
            yield
        finally:
            self.switch.pop()

    def adapter(self, modules: Sequence[str]) -> Weights:
        """Return a new adapter on these modules of every layer, which changes nothing yet."""
        device = self.lm.device
        return {
            name: (
                nn.Parameter(torch.randn(RANK, width, device=device) / math.sqrt(width)),
                nn.Parameter(torch.zeros(height, RANK, device=device)),
            )
            for name, (width, height) in self.linears.items()
            if name.rpartition(".")[2] in modules
        }

    def run(self, ids: Tensor, positions: Tensor, fixed: KV | None, seen: Tensor, **options: Any) -> tuple[Any, KV]:
        """Run `[B, R]` ids behind fixed keys and values; `seen` is `[R, P + R]`, or with more axes in front.

        Returns:
            The decoder's output, and the fresh keys and values of each layer.
        """
        layers = [BehindLayer(None if fixed is None else fixed[layer]) for layer in range(self.lm.n_layers)]
        mask = torch.zeros(seen.shape, dtype=self.lm.dtype).masked_fill(~seen, -torch.inf).to(self.lm.device)
        output = self.model.get_decoder()(
            input_ids=ids.to(self.lm.device),
            position_ids=positions.to(self.lm.device),
            attention_mask=mask[(None,) * (4 - mask.dim())],
            use_cache=True,
            **{cache_argument(): Cache(layers=layers)},
            **options,
        )
        return output, [layer.fresh for layer in layers]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[N, vocabulary]` float32 logits of `[N, hidden]`."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits.float()

    @torch.no_grad()
    def teach(self, prompts: Sequence[TuningPrompt], answer_tokens: int) -> None:
        """Fill in full prefill's states and greedy answers of a batch of prompts."""
        longest, count, device = max(map(len, prompts)), len(prompts), self.lm.device
        ids = torch.tensor([prompt.ids + [0] * (longest - len(prompt)) for prompt in prompts])
        cache, positions = DynamicCache(), torch.arange(longest).expand(count, -1)
        real = torch.arange(longest)[None] < torch.tensor([[len(prompt)] for prompt in prompts])
        hidden = self.model.get_decoder()(
            input_ids=ids.to(device), position_ids=positions.to(device), **{cache_argument(): cache}
        ).last_hidden_state
        kv = [(layer.keys, layer.values) for layer in cache.layers]
        states = list[list[Tensor]]()
        for row, prompt in enumerate(prompts):
            place = slice(row, row + 1), slice(None), slice(len(prompt))
            prompt.full = [(keys[place].clone(), values[place].clone()) for keys, values in kv]
            prompt.question_teacher = hidden[row, prompt.question_start : len(prompt) - 1].clone()
            states.append([hidden[row, len(prompt) - 1].clone()])
        last, ends, running = torch.stack([each[0] for each in states]), end_tokens(self.lm), set(range(count))
        for step in range(answer_tokens):
            chosen = self.logits(last).argmax(-1).cpu()
            for row in list(running):
                prompts[row].answer.append(int(chosen[row]))
                if int(chosen[row]) in ends or step == answer_tokens - 1:
                    running.remove(row)
            if not running:
                break
            seen = torch.cat([real, torch.ones(count, step + 1, dtype=torch.bool)], 1)[:, None, None]
            at = torch.tensor([[len(prompt) + step] for prompt in prompts])
            output, fresh = self.run(chosen[:, None], at, kv, seen)
            kv = [(torch.cat([k, a], 2), torch.cat([v, b], 2)) for (k, v), (a, b) in zip(kv, fresh, strict=True)]
            last = output.last_hidden_state[:, 0]
            for row in running:
                states[row].append(last[row].clone())
        for prompt, each in zip(prompts, states, strict=True):
            prompt.teacher = torch.stack(each)

    def write(self, prompt: TuningPrompt, writer: Weights) -> KV:
        """Return a prompt's stored keys and values: those of the first passage are exact, the others primed."""
        spans, front = prompt.chunks[1:], self.front_tokens
        width = max(stop - start for start, stop in spans)
        ids = torch.tensor([prompt.ids[start:stop] + [0] * (width - stop + start) for start, stop in spans])
        seen = torch.cat(
            [torch.ones(width, front, dtype=torch.bool), torch.ones(width, width, dtype=torch.bool).tril()], 1
        )
        with self.using(writer):
            _, fresh = self.run(ids, (front + torch.arange(width)).expand(len(spans), -1), self.front, seen)
        placed, exact = [], prompt.chunks[0][1]
        for layer, (keys, values) in enumerate(fresh):
            whole = prompt.full[layer]
            parts: list[list[Tensor]] = [[each[:, :, :exact]] for each in whole]
            at = exact
            for row, (start, stop) in enumerate(spans):
                distances = torch.full((stop - start,), start - front, device=keys.device)
                moved = self.lm.ropes[layer].rotated(keys[row : row + 1, :, : stop - start], distances)
                for part, full, new in zip(
                    parts, whole, (moved, values[row : row + 1, :, : stop - start]), strict=True
                ):
                    part += [torch.zeros_like(full[:, :, at:start]), new]  # a gap has rows of its own
                at = stop
            for part, full in zip(parts, whole, strict=True):
                part.append(torch.zeros_like(full[:, :, at:]))
            placed.append((torch.cat(parts[0], 2), torch.cat(parts[1], 2)))
        return placed

    @torch.no_grad()
    def prepare(self, prompt: TuningPrompt) -> None:
        """Fill in a prompt's stored caches without adapters, and the order in which its tokens are recomputed."""
        prompt.stored = self.write(prompt, {})
        prompt.order = self.order(prompt, prompt.stored, {})

    @torch.no_grad()
    def order(self, prompt: TuningPrompt, stored: KV, reader: Weights) -> Tensor:
        """Return passage positions, but those of the first passage, by falling attention of the question."""
        rows = torch.arange(prompt.chunks[-1][1], len(prompt))
        rows = rows[~prompt.known[rows]]
        self.model.set_attn_implementation("eager")  # the only one that gives the attention
        try:
            ids = torch.tensor([[prompt.ids[row] for row in rows]])
            seen = self.seen(prompt, rows, torch.zeros(len(prompt), dtype=torch.bool))
            with self.using(reader):
                output, _ = self.run(ids, rows[None], stored, seen, output_attentions=True)
        finally:
            self.model.set_attn_implementation(self.lm.stock_attention)
        candidates = prompt.known.clone()
        candidates[: prompt.chunks[0][1]] = False
        scores = torch.zeros(len(prompt))
        for attention in output.attentions[self.lm.n_layers // 2 :]:
            paid = attention[0].float().sum((0, 1))[: len(prompt)].cpu() * candidates
            scores += paid / paid.sum()
        return scores.masked_fill(~candidates, -1).argsort(descending=True)[: int(candidates.sum())]

    def seen(self, prompt: TuningPrompt, rows: Tensor, replaced: Tensor) -> Tensor:
        """Return which stored positions and rows each row sees, `[R, T + R]`."""
        stored = (prompt.known & ~replaced) & (torch.arange(len(prompt)) < rows[:, None])
        return torch.cat([stored, rows <= rows[:, None]], 1)

    def read(self, prompt: TuningPrompt, stored: KV, ratio: float, reader: Weights) -> tuple[Tensor, Tensor]:
        """Return the hidden states of the question's rows, and of those from which the answer's tokens are chosen."""
        replaced = torch.zeros(len(prompt), dtype=torch.bool)
        replaced[prompt.order[: int(ratio * len(prompt.order))]] = True
        computed = (~prompt.known | replaced).nonzero()[:, 0]
        rows = torch.cat([computed, len(prompt) + torch.arange(len(prompt.answer) - 1)])
        ids = [*prompt.ids, *prompt.answer]
        with self.using(reader):
            chosen = torch.tensor([[ids[row] for row in rows]])
            output, _ = self.run(chosen, rows[None], stored, self.seen(prompt, rows, replaced))
        hidden = output.last_hidden_state[0]
        return hidden[(rows >= prompt.question_start) & (rows < len(prompt) - 1)], hidden[rows >= len(prompt) - 1]

    def divergence(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Return the KL divergence of each row in nats."""
        expected, found = self.logits(teacher).log_softmax(-1), self.logits(student).log_softmax(-1)
        return (expected.exp() * (expected - found)).sum(-1)

    def loss(self, prompt: TuningPrompt, ratio: float, reader: Weights, writer: Weights) -> Tensor:
        """Return the loss of a prepared prompt: the answer's rows count four times the question's."""
        stored = prompt.stored
        if writer:
            stored = self.write(prompt, writer)
            if ratio:
                prompt.order = self.order(prompt, stored, reader)
        question, answer = self.read(prompt, stored, ratio, reader)
        loss = self.divergence(prompt.teacher, answer).mean()
        if len(question):
            loss = loss + 0.25 * self.divergence(prompt.question_teacher, question).mean()
        return loss


def measure(options: Options, run: Run) -> None:
    """Train each adapter on the same prompts, and measure it on held-out ones; a stopped run begins anew."""
    if unknown := set(split_names(options.variants)) - VARIANTS.keys():
        raise QCFuseError(f"no adapter: {', '.join(unknown)}; {', '.join(VARIANTS)} are known")
    if len(split_names(options.variants)) != len(options.rates.split(",")):
        raise QCFuseError("--rates has a learning rate for each of --variants")
    torch.manual_seed(options.seed)
    names, ratios, ends = (
        split_names(options.variants),
        shares(options.ratios),
        sorted(map(int, options.measured.split(","))),
    )
    with MemoryStore() as store, options.load_engine(store) as engine:
        lm, prompts = engine.lm, engine.prompts
        primer = primer_ids([prompts.chunk_ids(text) for text in PRIMER], lm.context_window.tokens)
        trainer = Trainer(lm, prompts.prefix_ids, primer)
        held, passages = held_out(options)
        examples = [e for name in split_names(options.train) for e in read_dataset(options.data_dir / f"{name}.jsonl")]
        run.begin(about_model(lm), {**machine_conditions(lm), "seed": options.seed, "variants": options.variants})
        sets = {
            name: [TuningPrompt.of(prompts, e.question, e.passages, name) for e in each] for name, each in held.items()
        }
        chance, pool = random.Random(options.seed + 1), sorted(passages)
        for task in ("number", "chain"):
            sets[task] = [task_prompt(prompts, pool, chance, task) for _ in range(max(1, options.size // 2))]
        for each in sets.values():
            for start in range(0, len(each), options.batch):
                trainer.teach(each[start : start + options.batch], options.answer_tokens)
            for prompt in each:
                trainer.prepare(prompt)
        evaluate(trainer, run, ("untuned", 0), sets, ratios, {}, {})
        adapters = {name: tuple(map(trainer.adapter, VARIANTS[name])) for name in names}
        for name in read_adapters(options.adapters, adapters) if options.adapters is not None else ():
            evaluate(trainer, run, (f"{name}, as read", 0), sets, ratios, *adapters[name])
        rates = dict(zip(names, map(float, options.rates.split(",")), strict=True))
        steps = {
            name: torch.optim.AdamW([weight for part in parts for pair in part.values() for weight in pair])
            for name, parts in adapters.items()
        }
        made, done = training_prompts(prompts, examples, passages, options.seed), 0
        waiting, earlier = list[TuningPrompt](), list[TuningPrompt]()
        while done < ends[-1]:
            if not waiting:  # padded to equal lengths, so of similar ones
                waiting = sorted(islice(made, 8 * options.batch), key=len)
                waiting = [
                    prompt
                    for start in chance.sample(range(0, len(waiting), options.batch), 8)
                    for prompt in waiting[start : start + options.batch]
                ]
            batch, waiting = waiting[: options.batch], waiting[options.batch :]
            trainer.teach(batch, options.answer_tokens)
            for prompt in batch if any(not writer for _, writer in adapters.values()) else ():
                trainer.prepare(prompt)
            done += len(batch)
            if options.replayed:
                for prompt in batch:
                    prompt.full = []
                new, batch = batch, [*batch, *chance.sample(earlier, min(options.replayed, len(earlier)))]
                earlier += new
            shown = [chance.choice(ratios) for _ in batch]
            for name, (reader, writer) in adapters.items():
                losses = []
                for prompt, ratio in zip(batch, shown, strict=True):
                    loss = trainer.loss(prompt, ratio, reader, writer) / len(batch)
                    loss.backward()  # type: ignore[no-untyped-call]
                    losses.append(float(loss.detach()))
                step = steps[name]
                (group,) = step.param_groups
                group["lr"] = rates[name] * min(1.0, done / (10 * options.batch)) * (1 - (done - 1) / ends[-1])
                torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
                step.step()
                step.zero_grad()
                run.add(("step", name, done), {"loss": sum(losses), "at": time.time()})
            run.progress(done, ends[-1])
            if any(done - options.batch < end <= done for end in ends):
                for name, (reader, writer) in adapters.items():
                    evaluate(trainer, run, (name, done), sets, ratios, reader, writer)
                if options.adapters is not None:
                    write_adapters(options.adapters, adapters)


def held_out(options: Options) -> tuple[dict[str, list[Example]], set[str]]:
    """Return the questions to measure on, over four passages or more, and every passage of their sets."""
    found, passages = dict[str, list[Example]](), set[str]()
    for name in split_names(options.held_out):
        examples = read_dataset(options.data_dir / f"{name}.jsonl")
        passages |= {text for example in examples for text in example.passages}
        chosen = examples[options.first : options.first + options.size]
        found[name] = [example.with_distractors(max(1, 4 - len(example.supporting))) for example in chosen]
    return found, passages


@torch.no_grad()
def evaluate(
    trainer: Trainer,
    run: Run,
    key: tuple[str, int],
    sets: Mapping[str, Sequence[TuningPrompt]],
    ratios: Sequence[float],
    reader: Weights,
    writer: Weights,
) -> None:
    """Record, for each prompt and ratio, the mean and first KL along the answer, and whether the answer is the same."""
    for name, prompts in sets.items():
        figures = dict[float, list[list[float]]]()
        for prompt in prompts:
            stored = trainer.write(prompt, writer) if writer else prompt.stored
            if reader or writer:
                prompt.order = trainer.order(prompt, stored, reader)
            for ratio in ratios:
                _, answer = trainer.read(prompt, stored, ratio, reader)
                divergence = trainer.divergence(prompt.teacher, answer)
                same = (trainer.logits(answer).argmax(-1).cpu() == torch.tensor(prompt.answer)).all()
                figures.setdefault(ratio, []).append([float(divergence.mean()), float(divergence[0]), float(same)])
        for ratio, found in figures.items():
            run.add(("held out", *key, name, ratio), {"figures": found})


def report(run: Run) -> Report:
    """Return for each adapter, number of prompts, set and ratio the means over the held-out prompts."""
    rows = []
    for (variant, prompts, name, ratio), record in run.of("held out"):
        means = [fmean(column) for column in zip(*record["figures"], strict=True)]
        rows.append([str(variant), str(prompts), str(name), f"{ratio:g}", *(f"{mean:.4f}" for mean in means)])
    columns = ["adapter", "prompts", "set", "ratio", "KL", "KL of the first token", "same answers"]
    return Report({"rows": rows}, [Table("divergence from full prefill", columns, rows)])


def write_adapters(folder: Path, adapters: Mapping[str, tuple[Weights, ...]]) -> None:
    """Write each adapter to a safetensors file in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, parts in adapters.items():
        tensors = {f"{role}.{at}.{side}": weight.data for role, at, side, weight in _weights(parts)}
        save_file(tensors, folder / f"{name}.safetensors")


def read_adapters(folder: Path, adapters: Mapping[str, tuple[Weights, ...]]) -> list[str]:
    """Fill in the adapters that a folder has; return their names."""
    found = [name for name in adapters if (folder / f"{name}.safetensors").exists()]
    for name in found:
        tensors = load_file(folder / f"{name}.safetensors")
        for role, at, side, weight in _weights(adapters[name]):
            weight.data.copy_(tensors[f"{role}.{at}.{side}"])
    return found


def _weights(parts: Sequence[Weights]) -> Iterator[tuple[str, str, str, nn.Parameter]]:
    for role, adapter in zip(("reader", "writer"), parts, strict=True):
        for at, pair in adapter.items():
            for side, weight in zip(("down", "up"), pair, strict=True):
                yield role, at, side, weight
