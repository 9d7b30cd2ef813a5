"""Run questions: prefill each configuration alone on the same token ids, then decode all answers as one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.evaluation.quality.configurations import FULL, Configuration
from qcfuse_rag.evaluation.quality.metrics import scores
from qcfuse_rag.evaluation.quality.offline import NeighbourPool, depends_on_neighbours, prepare
from qcfuse_rag.evaluation.quality.records import Record, RecordLog, digest_of_passages
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.generation.detokenizer import Detokenizer
from qcfuse_rag.generation.stop_criteria import end_tokens
from qcfuse_rag.monitoring.divergence import divergence
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import model_inputs
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.verification.samples import Example

GOLD_ROWS = 16  # rows of the gold answer in one pass, which bounds the memory of the logits


@dataclass(frozen=True, slots=True, eq=False)
class BatchedDecoder:
    """Prefilled prompts of many methods, of `length` tokens each, in one batch, so that one pass serves all of them.

    All methods see the same ids, so their buffers have the same length, and a sequence gets the same tokens as alone.
    Only the time differs, so times to first token are measured method by method beforehand. `logits` are the scores of
    the first new token, `[B, vocabulary]` float32.
    """

    lm: LanguageModel
    buffer: KVBuffer
    logits: Tensor
    length: int

    @classmethod
    def stack(
        cls, lm: LanguageModel, prefilled: Iterable[Prefilled], count: int, length: int, room: int
    ) -> BatchedDecoder:
        """Copy `count` prefilled prompts side by side as they come, so that their own buffers exist one at a time."""
        buffer = KVBuffer.allocate(lm.shapes, length + room, dtype=lm.dtype, device=lm.device, batch=count)
        logits = []
        for index, result in enumerate(prefilled):
            sources, targets = (*result.buffer.keys, *result.buffer.values), (*buffer.keys, *buffer.values)
            for target, source in zip(targets, sources, strict=True):
                target[index, :, :length] = source[0, :, :length]
            logits.append(result.logits)
        return cls(lm, buffer, torch.stack(logits), length)

    @torch.inference_mode()
    def gold_nll(self, gold: Sequence[int]) -> list[float]:
        """Return each sequence's mean negative log-likelihood of the gold answer, in nats a token; 0 without tokens."""
        if not gold:
            return [0.0] * len(self.logits)
        ids = torch.tensor(gold, device=self.lm.device)
        total = -self.logits.double().log_softmax(-1)[:, ids[0]]
        for start in range(0, len(gold) - 1, GOLD_ROWS):
            fed = ids[start : min(start + GOLD_ROWS, len(gold) - 1)]
            expected = ids[start + 1 : start + 1 + len(fed)]
            logits = self._forward(fed.expand(len(self.logits), -1), self.length + start, keep=len(fed))
            chosen = logits.log_softmax(-1).gather(2, expected[None, :, None].expand(len(logits), -1, 1))
            total -= chosen.double().sum((1, 2))
        return [float(value) / len(gold) for value in total]

    @torch.inference_mode()
    def greedy(self, max_new_tokens: int) -> list[tuple[int, ...]]:
        """Return each sequence's most likely tokens, up to and including its end token."""
        ends = end_tokens(self.lm)
        answers: list[list[int]] = [[] for _ in range(len(self.logits))]
        unfinished, logits = set(range(len(answers))), self.logits
        for step in range(max_new_tokens):
            tokens = logits.argmax(-1)
            listed = tokens.tolist()
            for i in sorted(unfinished):
                answers[i].append(listed[i])
                if listed[i] in ends:
                    unfinished.discard(i)
            if not unfinished or step + 1 == max_new_tokens:
                break
            logits = self._forward(tokens[:, None], self.length + step, keep=1)[:, -1]
        return [tuple(answer) for answer in answers]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of an answer's tokens as streaming would give it, without surrounding white space."""
        detokenizer = Detokenizer(self.lm.tokenizer.backend_tokenizer, ())
        return ("".join(detokenizer.push(token) for token in ids) + detokenizer.flush()).strip()

    def _forward(self, ids: Tensor, position: int, keep: int) -> Tensor:
        """Compute rows of all sequences from `position` on: ids `[B, R]` to logits `[B, keep, vocabulary]` float32."""
        plan = RowsPlan.between(position, position + ids.shape[1], ids.device, self.lm.sliding)
        logits: Tensor = self.lm.model(**model_inputs(ids, plan, self.buffer), logits_to_keep=keep).logits
        return logits[:, -keep:].float()


T = TypeVar("T")

STACK_BYTES = 3 << 30  # most bytes of keys and values in one batch of configurations


@dataclass(slots=True)
class PendingQuestion:
    """A question to run, with the prompt and the gold answer's tokens that all its configurations share.

    `beside` is the digest of the passages prepared together.
    """

    example: Example
    prompt: Prompt
    gold: tuple[int, ...]
    beside: str

    @property
    def answer_tokens(self) -> int:
        """Tokens to reserve for the answer, generated or gold."""
        return max(self.example.max_new_tokens, len(self.gold))


def run_questions(
    engine: FusionEngine,
    examples: Sequence[Example],
    chosen: list[Configuration],
    log: RecordLog,
    *,
    group: int | None = None,
    pool: NeighbourPool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Add a record to the log for every question and configuration that it lacks; return why others could not run.

    Records of enriched and captured caches are made again if they were made beside other passages. Full prefill, the
    first configuration, runs along with every missing one, because divergences and paired times need it. With a
    `group`, so many questions are prepared together, and the store is emptied after them. Neighbours are searched in
    `pool`, by default among the passages prepared together.
    """
    skipped: list[str] = []
    done, warm = 0, False
    for batch in _groups(examples, group or max(1, len(examples))):
        passages = [text for example in batch for text in example.passages]
        searched = [*pool.texts, str(pool.neighbours)] if pool is not None and pool != NeighbourPool() else []
        beside = digest_of_passages([*passages, *searched])
        todo = [(example, log.missing(example, chosen, beside)) for example in batch]
        needed = list({configuration.key: configuration for _, missing in todo for configuration in missing}.values())
        # All passages of the group are prepared, because an enriched passage depends on the others.
        for cost in prepare(engine, needed, passages, pool).values() if needed else ():
            log.add_offline(cost)
        for example, missing in todo:
            if missing:
                question = _pending(engine, example, beside)
                limit = engine.lm.window.tokens
                if len(question.prompt) + question.answer_tokens > limit:
                    skipped.append(f"{example.dataset} {example.id}: its prompt exceeds the window of {limit:,} tokens")
                else:
                    order = [chosen[0], *(configuration for configuration in missing if configuration.label != FULL)]
                    if not warm:  # the first passes of a process are slower
                        for configuration in order:
                            engine.prefill(
                                question.prompt, method=configuration.method, answer_tokens=question.answer_tokens
                            )
                        warm = True
                    turn = done % len(order)
                    for record in answer(engine, question, order[turn:] + order[:turn]):
                        log.add(record)
                    log.flush()
            done += 1
            if progress is not None:
                progress(done, len(examples))
        if group is not None:
            engine.store.clear()
    return skipped


def answer(engine: FusionEngine, question: PendingQuestion, order: Sequence[Configuration]) -> Iterator[Record]:
    """Yield the records of a question, one for each configuration; full prefill must be one of them."""
    length, answer_tokens = len(question.prompt), question.answer_tokens
    batch = max(1, STACK_BYTES // (engine.lm.kv_bytes_per_token * (length + answer_tokens)))
    results: list[tuple[Configuration, FusionReport, Tensor, float, str]] = []
    for group in _groups(order, batch):
        reports: list[FusionReport] = []

        def prefilled(
            group: Sequence[Configuration] = group, reports: list[FusionReport] = reports
        ) -> Iterator[Prefilled]:
            for configuration in group:
                result = engine.prefill(question.prompt, method=configuration.method, answer_tokens=answer_tokens)
                reports.append(result.report)
                yield result

        decoder = BatchedDecoder.stack(engine.lm, prefilled(), len(group), length, answer_tokens)
        nll = decoder.gold_nll(question.gold)
        texts = [decoder.text(ids) for ids in decoder.greedy(question.example.max_new_tokens)]
        results += zip(group, reports, decoder.logits.clone(), nll, texts, strict=True)
    full_logits, full_s = next(
        (logits, report.timings.ttft_s) for configuration, report, logits, *_ in results if configuration.label == FULL
    )
    for configuration, report, logits, likelihood, text in results:
        yield _record(question, configuration, report, text, likelihood, divergence(full_logits, logits), full_s)


def _record(
    question: PendingQuestion,
    configuration: Configuration,
    report: FusionReport,
    text: str,
    nll: float,
    kl: float,
    full_s: float,
) -> Record:
    example, timings = question.example, report.timings
    return {
        "id": example.id,
        "dataset": example.dataset,
        "method": configuration.label,
        "base": configuration.base,
        "ratio": configuration.ratio,
        "rows": report.rows,
        "context_tokens": report.context_tokens,
        **scores(text, example.answers, needs_all=example.needs_all),
        "nll": nll,
        "kl": kl,
        "ttft_s": timings.ttft_s,
        "full_ttft_s": full_s,
        **{name: getattr(timings, name) for name in ("load_s", "probe_s", "select_s", "recompute_s")},
        "bytes_loaded": report.bytes_loaded,
        "row_layers": report.row_layers,
        "fallback": report.fallback,
        "answer": text,
        **({"beside": question.beside} if depends_on_neighbours(configuration) else {}),
    }


def _pending(engine: FusionEngine, example: Example, beside: str) -> PendingQuestion:
    prompt = engine.prompt(example.question, example.passages)
    tokenizer = engine.lm.tokenizer
    # A chat template's answer begins a turn; without one it goes on after "Answer:".
    text = example.gold.strip() if tokenizer.chat_template else f" {example.gold.strip()}"
    gold = tuple(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
    return PendingQuestion(example, prompt, gold, beside)


def _groups(items: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
