"""Fused prompts through which gradients flow to a writer.

The teacher is the same model's full prefill along its own greedy answer; the loss is the KL divergence on the rows of
question and answer. The idea is SemPIC's (arXiv 2607.28069). Caches are those of `auto`: the first passage is exact,
the others are primed and written with the writer, and rows are chosen by the question's attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from qcfuse_rag.generation.completion import end_tokens
from qcfuse_rag.ingestion.primer import PRIMER, primer_ids
from qcfuse_rag.models.rope import cache_argument, decoder_of
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.model_views import stock_model
from qcfuse_rag.runtime.writer import WriterWeights, adapted_view, linear_layers
from qcfuse_rag.tuning.prompts import TuningPrompt

RANK = 8
ANSWER_TOKENS = 24
QUESTION_WEIGHT = 0.25
"""Weight of the question's rows in the loss, beside 1 for the answer's."""

KV = list[tuple[Tensor, Tensor]]
Prompts = Sequence[TuningPrompt]


class Trainer:
    """A model and the passes over fused prompts; used within `stock_attention(lm)`."""

    def __init__(self, lm: LanguageModel, prompts: PromptBuilder) -> None:
        self.lm, self.model = lm, stock_model(lm.model)  # gradients do not flow through packed weights
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        primer = primer_ids([prompts.chunk_ids(text) for text in PRIMER], lm.context_window.tokens)
        front = torch.tensor([[*prompts.prefix_ids, *primer]])
        self.front_tokens = front.shape[1]
        causal = torch.ones(self.front_tokens, self.front_tokens, dtype=torch.bool).tril()
        with torch.no_grad():
            self.run(front, torch.arange(self.front_tokens)[None], cache := DynamicCache(), causal)
        self.front = _pairs(cache)

    def new_writer(self, seed: int) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """Return a writer in float32 that changes nothing yet."""
        device, generator = self.lm.device, torch.Generator().manual_seed(seed)
        return {
            name: (
                nn.Parameter((torch.randn(RANK, width, generator=generator) / math.sqrt(width)).to(device)),
                nn.Parameter(torch.zeros(height, RANK, device=device)),
            )
            for name, (width, height) in linear_layers(self.model).items()
        }

    def cast(self, writer: WriterWeights) -> WriterWeights:
        """Return a writer in the model's dtype; one operation casts all of it, and gradients flow through."""
        weights = [weight for pair in writer.values() for weight in pair]
        flat = torch.cat([weight.flatten() for weight in weights]).to(self.lm.dtype)
        parts = torch.split(flat, [weight.numel() for weight in weights])
        cast = [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
        return dict(zip(writer, zip(cast[::2], cast[1::2], strict=True), strict=True))

    def run(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: DynamicCache,
        seen: Tensor,
        writer: WriterWeights | None = None,
        **options: Any,
    ) -> Any:
        """Run `[B, R]` ids behind a cache, which then has theirs too; `seen` is `[R, P + R]` or `[B, 1, R, P + R]`."""
        seen = seen.to(self.lm.device)
        mask = torch.zeros(seen.shape, dtype=self.lm.dtype, device=seen.device).masked_fill(~seen, -torch.inf)
        return decoder_of(adapted_view(self.model, writer) if writer else self.model)(
            input_ids=ids.to(self.lm.device),
            position_ids=positions.to(self.lm.device),
            attention_mask=mask[(None,) * (4 - mask.dim())],
            use_cache=True,
            **{cache_argument(): cache},
            **options,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[N, vocabulary]` float32 logits of `[N, hidden]`."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits.float()

    @torch.no_grad()
    def teach(self, prompts: Prompts) -> None:
        """Fill in what full prefill gives for some prompts."""
        longest, count, device = max(map(len, prompts)), len(prompts), self.lm.device
        ids = torch.tensor([prompt.ids + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
        cache, lengths = DynamicCache(), torch.tensor([len(prompt) for prompt in prompts], device=device)
        positions = torch.arange(longest, device=device)
        hidden = decoder_of(self.model)(
            input_ids=ids, position_ids=positions.expand(count, -1), **{cache_argument(): cache}
        ).last_hidden_state
        full = _pairs(cache)
        states, answers = [hidden[torch.arange(count, device=device), lengths - 1]], [list[int]() for _ in prompts]
        ends, running = end_tokens(self.lm), set(range(count))
        for step in range(ANSWER_TOKENS):
            chosen = self.logits(states[-1]).argmax(-1)
            for row, token in enumerate(chosen.tolist()):
                if row in running:
                    answers[row].append(token)
                    if token in ends or step == ANSWER_TOKENS - 1:
                        running.remove(row)
            if not running:
                break
            seen = positions < lengths[:, None]
            seen = torch.cat([seen, seen.new_ones(count, step + 1)], 1)[:, None, None]
            output = self.run(chosen[:, None], lengths[:, None] + step, cache, seen)
            states.append(output.last_hidden_state[:, 0])
        for row, prompt in enumerate(prompts):
            prompt.answer, end = answers[row], prompt.chunks[0][1]
            prompt.teacher = torch.stack([state[row] for state in states[: len(prompt.answer)]])
            prompt.question_teacher = hidden[row, prompt.question_start : len(prompt) - 1].clone()
            prompt.first = [(keys[row, :, :end].clone(), values[row, :, :end].clone()) for keys, values in full]

    def write(self, prompts: Prompts, writer: WriterWeights) -> KV:
        """Return the prompts' stored keys and values: those of first passages are exact, the others primed."""
        spans = [(row, *span) for row, prompt in enumerate(prompts) for span in prompt.chunks[1:]]
        width, front, device = max(stop - start for _, start, stop in spans), self.front_tokens, self.lm.device
        ids = torch.tensor([prompts[row].ids[start:stop] + [0] * (width - stop + start) for row, start, stop in spans])
        seen = torch.ones(width, front + width, dtype=torch.bool).tril(front)
        cache = _cache(self.front, len(spans))
        self.run(ids, (front + torch.arange(width)).expand(len(spans), -1), cache, seen, writer)
        rows, starts, stops = torch.tensor(spans, device=device).unbind(1)
        passage = torch.repeat_interleave(torch.arange(len(spans), device=device), stops - starts)
        token = torch.cat([torch.arange(stop - start, device=device) for _, start, stop in spans])
        longest, placed = max(map(len, prompts)), []
        for layer, parts in enumerate(_pairs(cache)):
            keys, values = (part[passage, :, front + token] for part in parts)
            keys = self.lm.ropes[layer].rotated(keys.transpose(0, 1), starts[passage] - front).transpose(0, 1)
            whole = []
            for side, moved in enumerate((keys, values)):
                first = pad_sequence([prompt.first[layer][side].transpose(0, 1) for prompt in prompts], True)
                each = F.pad(first.transpose(1, 2), (0, 0, 0, longest - first.shape[1]))
                each[rows[passage], :, starts[passage] + token] = moved
                whole.append(each)
            placed.append((whole[0], whole[1]))
        return placed

    @torch.no_grad()
    def choose(self, prompts: Prompts, stored: KV) -> None:
        """Fill in the order of passage positions, but those of first passages, by falling attention of questions."""
        rows = [
            torch.tensor([at for at in range(prompt.chunks[-1][1], len(prompt)) if not prompt.known[at]])
            for prompt in prompts
        ]
        candidates = _known(prompts).to(self.lm.device)
        self.lm.model.set_attn_implementation("eager")  # the only one that gives the attention
        try:
            output, at = self.run_rows(prompts, rows, torch.zeros_like(candidates), stored, output_attentions=True)
        finally:
            self.lm.model.set_attn_implementation(self.lm.stock_attention)
        for row, prompt in enumerate(prompts):
            candidates[row, : prompt.chunks[0][1]] = False
        scores = torch.zeros(candidates.shape, device=candidates.device)
        for attention in output.attentions[self.lm.n_layers // 2 :]:
            paid = (attention.float() * (at >= 0)[:, None, :, None]).sum((1, 2))[:, : candidates.shape[1]] * candidates
            scores += paid / paid.sum(1, keepdim=True)
        order = scores.masked_fill(~candidates, -1).argsort(descending=True).cpu()
        for prompt, each, count in zip(prompts, order, candidates.sum(1).tolist(), strict=True):
            prompt.order = each[:count]

    def run_rows(
        self, prompts: Prompts, rows: Sequence[Tensor], replaced: Tensor, stored: KV, **options: Any
    ) -> tuple[Any, Tensor]:
        """Run some rows of each prompt behind its stored tokens, but the replaced ones.

        Returns:
            The decoder's output, and `[B, R]` positions, -1 behind the last row of a prompt.
        """
        at = pad_sequence(list(rows), True, -1)
        known = _known(prompts) & ~replaced.cpu()
        texts = [torch.tensor([*prompt.ids, *prompt.answer])[each] for prompt, each in zip(prompts, rows, strict=True)]
        stored_seen = known[:, None] & (torch.arange(known.shape[1]) < at[:, :, None])
        alone = torch.eye(at.shape[1], dtype=torch.bool)  # padding has to see something
        rows_seen = (at[:, None] <= at[:, :, None]) & (at >= 0)[:, None] | alone
        seen = torch.cat([stored_seen, rows_seen], 2)[:, None]
        output = self.run(pad_sequence(texts, True), at.clamp(min=0), _cache(stored, len(prompts)), seen, **options)
        return output, at.to(self.lm.device)

    def read(self, prompts: Prompts, stored: KV, ratios: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return the hidden states of the questions' rows, and of those from which the answers' tokens are chosen.

        A prompt's rows follow those of the prompt before.
        """
        replaced, rows = torch.zeros(_known(prompts).shape, dtype=torch.bool), []
        for row, (prompt, ratio) in enumerate(zip(prompts, ratios, strict=True)):
            replaced[row, prompt.order[: int(ratio * len(prompt.order))]] = True
            computed = (~prompt.known | replaced[row, : len(prompt)]).nonzero()[:, 0]
            rows.append(torch.cat([computed, len(prompt) + torch.arange(len(prompt.answer) - 1)]))
        output, at = self.run_rows(prompts, rows, replaced, stored)
        asked = torch.tensor([[prompt.question_start] for prompt in prompts], device=at.device)
        last = torch.tensor([[len(prompt) - 1] for prompt in prompts], device=at.device)
        hidden = output.last_hidden_state
        return hidden[(at >= asked) & (at < last)], hidden[at >= last]

    def divergence(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Return the KL divergence of each row in nats."""
        expected, found = self.logits(teacher).log_softmax(-1), self.logits(student).log_softmax(-1)
        return (expected.exp() * (expected - found)).sum(-1)

    def loss(self, prompts: Prompts, ratios: Sequence[float], writer: WriterWeights) -> Tensor:
        """Return the loss of some prompts with a writer in float32."""
        stored = self.write(prompts, self.cast(writer))
        self.choose(prompts, stored)
        question, answer = self.read(prompts, stored, ratios)
        loss = self._mean_divergence([prompt.teacher for prompt in prompts], answer)
        return loss + QUESTION_WEIGHT * self._mean_divergence([prompt.question_teacher for prompt in prompts], question)

    @torch.no_grad()
    def measure(self, prompts: Prompts, ratios: Sequence[float], writer: WriterWeights) -> list[list[list[float]]]:
        """Return, for each ratio and prompt, the mean and first KL along the answer, and whether it is the same."""
        stored = self.write(prompts, self.cast(writer))
        self.choose(prompts, stored)
        found = []
        for ratio in ratios:
            _, rows = self.read(prompts, stored, [ratio] * len(prompts))
            answers = torch.split(rows, [len(prompt.answer) for prompt in prompts])
            figures = list[list[float]]()
            for prompt, answer in zip(prompts, answers, strict=True):
                kl, same = self.divergence(prompt.teacher, answer), self.logits(answer).argmax(-1).tolist()
                figures.append([float(kl.mean()), float(kl[0]), float(same == prompt.answer)])
            found.append(figures)
        return found

    def _mean_divergence(self, teachers: Sequence[Tensor], student: Tensor) -> Tensor:
        """Return the mean over prompts of the mean over their rows."""
        share = torch.cat([torch.full((len(each),), 1 / len(each)) for each in teachers if len(each)])
        found = self.divergence(torch.cat(list(teachers)), student)
        return (found * share.to(found.device)).sum() / len(teachers)


def _known(prompts: Prompts) -> Tensor:
    """Return `[B, T]` bool, positions of stored text."""
    return pad_sequence([prompt.known for prompt in prompts], True)


def _pairs(cache: DynamicCache) -> KV:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _cache(kv: KV, count: int) -> DynamicCache:
    """Return a cache of `count` prompts with `[1 or count, Hkv, P, D]` keys and values."""
    cache = DynamicCache()
    for layer, pair in enumerate(kv):
        cache.update(*(each.expand(count, -1, -1, -1) for each in pair), layer)
    return cache
