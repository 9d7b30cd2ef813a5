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
from torch.nn.utils.rnn import pad_sequence
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
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.template import PromptTemplate
from qcfuse_rag.runtime.language_model import LanguageModel

SCALE = 2.0
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VARIANTS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "reader_q": (("q_proj",), ()),
    "reader_all": (EVERY, ()),
    "writer": ((), EVERY),
    "both": (EVERY, EVERY),
    "shared": (EVERY, EVERY),
}
"""Modules of the reader and of the writer; `shared` is one adapter, on for whatever is computed."""

KV = list[tuple[Tensor, Tensor]]
Weights = Mapping[str, tuple[Tensor, Tensor]]


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
        str, Option(help="Numbers of prompts after which to measure; the last ends it. 0 is the untuned model.")
    ] = "0,250,500"
    ratios: Annotated[str, Option(help="Shares to recompute, with commas.")] = "0,.05,.15"
    batch: Annotated[int, Option(min=1, help="Prompts of a step.")] = 4
    rank: Annotated[int, Option(min=1, help="Rank of the adapters.")] = 8
    answer_tokens: Annotated[int, Option(min=1, help="Most tokens of an answer.")] = 24
    seconds: Annotated[float, Option(help="Most seconds of the training; the rate has fallen to zero then.")] = math.inf
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
        low = F.linear(hidden, pair[0]).flatten(0, -2)
        return torch.addmm(output.flatten(0, -2), low, pair[1].T, alpha=SCALE).view_as(output)


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


class Batch:
    """Prompts that are computed together.

    Attributes:
        full: full prefill's keys and values of each layer, `[B, Hkv, T, D]`, padded behind.
        known: `[B, T]` bool, positions of stored text.
    """

    def __init__(self, prompts: list[TuningPrompt], full: KV) -> None:
        longest = max(map(len, prompts))
        self.prompts, self.full = prompts, [(keys[:, :, :longest], values[:, :, :longest]) for keys, values in full]
        self.known = pad_sequence([prompt.known for prompt in prompts], batch_first=True).to(full[0][0].device)

    def parts(self, size: int) -> Iterator[Batch]:
        """Yield batches of this many prompts."""
        for start in range(0, len(self.prompts), size):
            rows = slice(start, start + size)
            yield Batch(self.prompts[rows], [(keys[rows], values[rows]) for keys, values in self.full])


class Trainer:
    """A model with adapters, and passes over fused prompts through which gradients flow."""

    def __init__(self, lm: LanguageModel, prefix: Sequence[int], primer: Sequence[int]) -> None:
        self.model = stock_model(lm)  # gradients do not flow through packed weights
        self.model.set_attn_implementation(lm.stock_attention)
        self.lm, self.switch = lm, list[Weights]([{}])
        self.linears = dict[str, tuple[int, int]]()
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        for name, module in list(self.model.get_decoder().named_modules()):
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] in EVERY:
                self.linears[name] = module.in_features, module.out_features
                parent, _, child = name.rpartition(".")
                setattr(self.model.get_decoder().get_submodule(parent), child, AdaptedLinear(module, name, self.switch))
        self.front_ids = torch.tensor([[*prefix, *primer]])
        self.front_tokens = self.front_ids.shape[1]
        with torch.no_grad():
            self.front = self.prefill(self.front_ids, {})

    @contextmanager
    def using(self, adapter: Weights) -> Iterator[None]:
        """Switch an adapter on."""
        self.switch.append(adapter)
        try:
            yield
        finally:
            self.switch.pop()

    def adapter(self, modules: Sequence[str], rank: int) -> Weights:
        """Return a new adapter of a rank on these modules of every layer, which changes nothing yet."""
        device = self.lm.device
        return {
            name: (
                nn.Parameter(torch.randn(rank, width, device=device) / math.sqrt(width)),
                nn.Parameter(torch.zeros(height, rank, device=device)),
            )
            for name, (width, height) in self.linears.items()
            if name.rpartition(".")[2] in modules
        }

    def cast(self, adapter: Weights) -> Weights:
        """Return an adapter in the model's dtype; one operation casts all of it, and gradients flow through."""
        weights = [weight for pair in adapter.values() for weight in pair]
        if not weights:
            return {}
        flat = torch.cat([weight.flatten() for weight in weights]).to(self.lm.dtype)
        parts = torch.split(flat, [weight.numel() for weight in weights])
        cast = [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
        return dict(zip(adapter, zip(cast[::2], cast[1::2], strict=True), strict=True))

    def run(self, ids: Tensor, positions: Tensor, fixed: KV | None, seen: Tensor, **options: Any) -> tuple[Any, KV]:
        """Run `[B, R]` ids behind fixed keys and values; `seen` is `[R, P + R]`, or with more axes in front.

        Returns:
            The decoder's output, and the fresh keys and values of each layer.
        """
        layers = [BehindLayer(None if fixed is None else fixed[layer]) for layer in range(self.lm.n_layers)]
        seen = seen.to(self.lm.device)
        mask = torch.zeros(seen.shape, dtype=self.lm.dtype, device=seen.device).masked_fill(~seen, -torch.inf)
        output = self.model.get_decoder()(
            input_ids=ids.to(self.lm.device),
            position_ids=positions.to(self.lm.device),
            attention_mask=mask[(None,) * (4 - mask.dim())],
            use_cache=True,
            **{cache_argument(): Cache(layers=layers)},
            **options,
        )
        return output, [layer.fresh for layer in layers]

    def prefill(self, ids: Tensor, adapter: Weights) -> KV:
        """Return the keys and values of `[B, T]` ids at the beginning of a prompt."""
        length = ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        with self.using(adapter):
            return self.run(ids, torch.arange(length).expand(len(ids), -1), None, causal)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[N, vocabulary]` float32 logits of `[N, hidden]`."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits.float()

    @torch.no_grad()
    def teach(self, prompts: Sequence[TuningPrompt], answer_tokens: int) -> Batch:
        """Fill in full prefill's states and greedy answers of some prompts; return them with its keys and values."""
        longest, count, device = max(map(len, prompts)), len(prompts), self.lm.device
        ids = torch.tensor([prompt.ids + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
        cache, lengths = DynamicCache(), torch.tensor([len(prompt) for prompt in prompts], device=device)
        positions = torch.arange(longest, device=device)
        hidden = self.model.get_decoder()(
            input_ids=ids, position_ids=positions.expand(count, -1), **{cache_argument(): cache}
        ).last_hidden_state
        kv = full = [(layer.keys, layer.values) for layer in cache.layers]
        states = [hidden[torch.arange(count, device=device), lengths - 1]]
        ends, running = end_tokens(self.lm), set(range(count))
        for step in range(answer_tokens):
            chosen = self.logits(states[-1]).argmax(-1)
            for row, token in enumerate(chosen.tolist()):
                if row in running:
                    prompts[row].answer.append(token)
                    if token in ends or step == answer_tokens - 1:
                        running.remove(row)
            if not running:
                break
            seen = positions < lengths[:, None]
            seen = torch.cat([seen, seen.new_ones(count, step + 1)], 1)[:, None, None]
            output, fresh = self.run(chosen[:, None], lengths[:, None] + step, kv, seen)
            kv = [(torch.cat([k, a], 2), torch.cat([v, b], 2)) for (k, v), (a, b) in zip(kv, fresh, strict=True)]
            states.append(output.last_hidden_state[:, 0])
        for row, prompt in enumerate(prompts):
            prompt.teacher = torch.stack([state[row] for state in states[: len(prompt.answer)]])
            prompt.question_teacher = hidden[row, prompt.question_start : len(prompt) - 1].clone()
        return Batch(list(prompts), full)

    def write(self, batch: Batch, writer: Weights, reader: Weights) -> KV:
        """Return the prompts' stored keys and values: those of first passages are exact, the others primed."""
        before, exact = self.front, [prompt.chunks[0][1] for prompt in batch.prompts]
        begun = batch.full
        if writer and writer is reader:
            firsts = [torch.tensor(prompt.ids[:stop]) for prompt, stop in zip(batch.prompts, exact, strict=True)]
            before = self.prefill(self.front_ids, writer)
            rest = (0, 0, 0, batch.known.shape[1] - max(exact))
            begun = [
                (F.pad(keys, rest), F.pad(values, rest))
                for keys, values in self.prefill(pad_sequence(firsts, batch_first=True), writer)
            ]
        spans = [(row, *span) for row, prompt in enumerate(batch.prompts) for span in prompt.chunks[1:]]
        width, front, device = max(stop - start for _, start, stop in spans), self.front_tokens, self.lm.device
        ids = torch.tensor(
            [batch.prompts[row].ids[start:stop] + [0] * (width - stop + start) for row, start, stop in spans]
        )
        seen = torch.ones(width, front + width, dtype=torch.bool).tril(front)
        with self.using(writer):
            _, fresh = self.run(ids, (front + torch.arange(width)).expand(len(spans), -1), before, seen)
        rows, starts, stops = torch.tensor(spans, device=device).unbind(1)
        passage = torch.repeat_interleave(torch.arange(len(spans), device=device), stops - starts)
        token = torch.cat([torch.arange(stop - start, device=device) for _, start, stop in spans])
        places = torch.arange(batch.known.shape[1], device=device)
        first = (places < torch.tensor(exact, device=device)[:, None])[:, None, :, None]
        placed = []
        for layer, parts in enumerate(fresh):
            keys, values = (part[passage, :, token] for part in parts)
            keys = self.lm.ropes[layer].rotated(keys.transpose(0, 1), starts[passage] - front).transpose(0, 1)
            whole = [torch.where(first, each, 0) for each in begun[layer]]  # a gap has rows of its own
            for each, moved in zip(whole, (keys, values), strict=True):
                each[rows[passage], :, starts[passage] + token] = moved
            placed.append((whole[0], whole[1]))
        return placed

    @torch.no_grad()
    def choose(self, batch: Batch, stored: KV, reader: Weights) -> None:
        """Fill in the order of passage positions, but those of first passages, by falling attention of questions."""
        rows = [
            torch.tensor([at for at in range(prompt.chunks[-1][1], len(prompt)) if not prompt.known[at]])
            for prompt in batch.prompts
        ]
        self.model.set_attn_implementation("eager")  # the only one that gives the attention
        try:
            output, at = self.run_rows(batch, rows, torch.zeros_like(batch.known), stored, reader, True)
        finally:
            self.model.set_attn_implementation(self.lm.stock_attention)
        candidates, scores = batch.known.clone(), torch.zeros(batch.known.shape, device=batch.known.device)
        for row, prompt in enumerate(batch.prompts):
            candidates[row, : prompt.chunks[0][1]] = False
        for attention in output.attentions[self.lm.n_layers // 2 :]:
            paid = (attention.float() * (at >= 0)[:, None, :, None]).sum((1, 2))[:, : candidates.shape[1]] * candidates
            scores += paid / paid.sum(1, keepdim=True)
        order = scores.masked_fill(~candidates, -1).argsort(descending=True).cpu()
        for prompt, each, count in zip(batch.prompts, order, candidates.sum(1).tolist(), strict=True):
            prompt.order = each[:count]

    def run_rows(
        self,
        batch: Batch,
        rows: Sequence[Tensor],
        replaced: Tensor,
        stored: KV,
        reader: Weights,
        attentions: bool = False,
    ) -> tuple[Any, Tensor]:
        """Run some rows of each prompt behind its stored tokens, but the replaced ones.

        Returns:
            The decoder's output, and `[B, R]` positions, -1 behind the last row of a prompt.
        """
        at = pad_sequence(list(rows), batch_first=True, padding_value=-1).to(self.lm.device)
        texts = [
            torch.tensor([*prompt.ids, *prompt.answer])[each] for prompt, each in zip(batch.prompts, rows, strict=True)
        ]
        stored_seen = (batch.known & ~replaced)[:, None] & (
            torch.arange(batch.known.shape[1], device=at.device) < at[:, :, None]
        )
        alone = torch.eye(at.shape[1], dtype=torch.bool, device=at.device)  # padding has to see something
        rows_seen = (at[:, None] <= at[:, :, None]) & (at >= 0)[:, None] | alone
        seen = torch.cat([stored_seen, rows_seen], 2)[:, None]
        with self.using(reader):
            output, _ = self.run(
                pad_sequence(texts, batch_first=True), at.clamp(min=0), stored, seen, output_attentions=attentions
            )
        return output, at

    def read(self, batch: Batch, stored: KV, ratios: Sequence[float], reader: Weights) -> tuple[Tensor, Tensor]:
        """Return the hidden states of the questions' rows, and of those from which the answers' tokens are chosen.

        A prompt's rows follow those of the prompt before.
        """
        replaced, rows = torch.zeros(batch.known.shape, dtype=torch.bool), []
        for row, (prompt, ratio) in enumerate(zip(batch.prompts, ratios, strict=True)):
            replaced[row, prompt.order[: int(ratio * len(prompt.order))]] = True
            computed = (~prompt.known | replaced[row, : len(prompt)]).nonzero()[:, 0]
            rows.append(torch.cat([computed, len(prompt) + torch.arange(len(prompt.answer) - 1)]))
        output, at = self.run_rows(batch, rows, replaced.to(self.lm.device), stored, reader)
        asked, last = (
            torch.tensor([[of(prompt)] for prompt in batch.prompts], device=at.device)
            for of in (lambda prompt: prompt.question_start, lambda prompt: len(prompt) - 1)
        )
        hidden = output.last_hidden_state
        return hidden[(at >= asked) & (at < last)], hidden[at >= last]

    def divergence(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Return the KL divergence of each row in nats."""
        expected, found = self.logits(teacher).log_softmax(-1), self.logits(student).log_softmax(-1)
        return (expected.exp() * (expected - found)).sum(-1)

    def loss(self, batch: Batch, ratios: Sequence[float], reader: Weights, writer: Weights) -> Tensor:
        """Return the loss of a batch: an answer's rows count four times a question's."""
        shared, reader = writer is reader, self.cast(reader)
        writer = reader if shared else self.cast(writer)
        stored = self.write(batch, writer, reader)
        self.choose(batch, stored, reader)
        question, answer = self.read(batch, stored, ratios, reader)
        loss = self.mean_divergence([prompt.teacher for prompt in batch.prompts], answer)
        return loss + 0.25 * self.mean_divergence([prompt.question_teacher for prompt in batch.prompts], question)

    def mean_divergence(self, teachers: Sequence[Tensor], student: Tensor) -> Tensor:
        """Return the mean over prompts of the mean over their rows."""
        share = torch.cat([torch.full((len(each),), 1 / len(each)) for each in teachers if len(each)])
        found = self.divergence(torch.cat(list(teachers)), student)
        return (found * share.to(found.device)).sum() / len(teachers)


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
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each shape
    lm = options.load_model()
    prompts = PromptBuilder(lm.tokenizer, PromptTemplate(), lm.context_window.tokens)
    primer = primer_ids([prompts.chunk_ids(text) for text in PRIMER], lm.context_window.tokens)
    trainer = Trainer(lm, prompts.prefix_ids, primer)
    held, passages = held_out(options)
    examples = [e for name in split_names(options.train) for e in read_dataset(options.data_dir / f"{name}.jsonl")]
    run.begin(about_model(lm), {**machine_conditions(lm), "seed": options.seed, "variants": options.variants})
    sets = {name: [TuningPrompt.of(prompts, e.question, e.passages, name) for e in each] for name, each in held.items()}
    chance, pool = random.Random(options.seed + 1), sorted(passages)
    for task in ("number", "chain"):
        sets[task] = [task_prompt(prompts, pool, chance, task) for _ in range(max(1, options.size // 2))]
    taught = {
        name: [
            trainer.teach(each[start : start + options.batch], options.answer_tokens)
            for start in range(0, len(each), options.batch)
        ]
        for name, each in sets.items()
    }
    if 0 in ends:
        evaluate(trainer, run, ("untuned", 0), taught, ratios, {}, {})
    adapters = {name: [trainer.adapter(part, options.rank) for part in VARIANTS[name]] for name in names}
    for name in adapters.keys() & {"shared"}:
        adapters[name][1] = adapters[name][0]
    for name in read_adapters(options.adapters, adapters) if options.adapters is not None else ():
        evaluate(trainer, run, (f"{name}, as read", 0), taught, ratios, *adapters[name])
    rates = dict(zip(names, map(float, options.rates.split(",")), strict=True))
    steps = {
        name: torch.optim.AdamW([*dict.fromkeys(weight for part in parts for pair in part.values() for weight in pair)])
        for name, parts in adapters.items()
    }
    made, done = training_prompts(prompts, examples, passages, options.seed), 0
    waiting, began, passed = list[Batch](), time.monotonic(), 0.0
    while passed < 1 and ends[-1]:
        if not waiting:  # padded to equal lengths, so of similar ones
            some = sorted(islice(made, 8 * options.batch), key=len)
            waiting = [*trainer.teach(some, options.answer_tokens).parts(options.batch)]
            chance.shuffle(waiting)
        batch = waiting.pop()
        done += len(batch.prompts)
        passed = min(1.0, max(done / ends[-1], (time.monotonic() - began) / options.seconds))
        shown = [chance.choice(ratios) for _ in batch.prompts]
        for name, (reader, writer) in adapters.items():
            loss = trainer.loss(batch, shown, reader, writer)
            loss.backward()  # type: ignore[no-untyped-call]
            (group,) = steps[name].param_groups
            group["lr"] = rates[name] * min(1.0, done / (10 * options.batch)) * (1 - passed)
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
            steps[name].step()
            steps[name].zero_grad()
            run.add(("step", name, done), {"loss": float(loss.detach()), "at": time.time()})
        run.progress(done, ends[-1])
        if passed == 1 or any(done - len(batch.prompts) < end <= done for end in ends):
            if options.adapters is not None:
                write_adapters(options.adapters, adapters)
            for name, (reader, writer) in adapters.items():
                evaluate(trainer, run, (name, done), taught, ratios, reader, writer)


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
    sets: Mapping[str, Sequence[Batch]],
    ratios: Sequence[float],
    reader: Weights,
    writer: Weights,
) -> None:
    """Record, for each prompt and ratio, the mean and first KL along the answer, and whether the answer is the same."""
    shared, reader = writer is reader, trainer.cast(reader)
    writer = reader if shared else trainer.cast(writer)
    for name, batches in sets.items():
        figures = dict[float, list[list[float]]]()
        for batch in batches:
            stored = trainer.write(batch, writer, reader)
            trainer.choose(batch, stored, reader)
            for ratio in ratios:
                _, answers = trainer.read(batch, stored, [ratio] * len(batch.prompts), reader)
                sizes = [len(prompt.answer) for prompt in batch.prompts]
                for prompt, answer in zip(batch.prompts, torch.split(answers, sizes), strict=True):
                    divergence = trainer.divergence(prompt.teacher, answer)
                    same = trainer.logits(answer).argmax(-1).tolist() == prompt.answer
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


def write_adapters(folder: Path, adapters: Mapping[str, Sequence[Weights]]) -> None:
    """Write each adapter to a safetensors file in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, parts in adapters.items():
        tensors = {f"{role}.{at}.{side}": weight.data for role, at, side, weight in _weights(parts)}
        save_file(tensors, folder / f"{name}.safetensors")


def read_adapters(folder: Path, adapters: Mapping[str, Sequence[Weights]]) -> list[str]:
    """Fill in the adapters that a folder has; return their names."""
    found = [name for name in adapters if (folder / f"{name}.safetensors").exists()]
    for name in found:
        tensors = load_file(folder / f"{name}.safetensors")
        for role, at, side, weight in _weights(adapters[name]):
            weight.data.copy_(tensors[f"{role}.{at}.{side}"])
    return found


def _weights(parts: Sequence[Weights]) -> Iterator[tuple[str, str, str, Tensor]]:
    for role, adapter in zip(("reader", "writer"), parts, strict=True):
        for at, pair in adapter.items():
            for side, weight in zip(("down", "up"), pair, strict=True):
                yield role, at, side, weight
